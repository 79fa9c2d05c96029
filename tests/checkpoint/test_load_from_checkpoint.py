"""``load_from_checkpoint``: the module that was saved, made from its file alone."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tiny import QUIET, TinyModule, tiny_loader
from torch import nn

from paceline import DataModule, Trainer, TrainingModule
from paceline.checkpoint import single_file
from paceline.processes.seed import random_states

SETTINGS: dict[str, Any] = QUIET | {"max_epochs": 1}


class Sized(TinyModule):
    def __init__(self, width: int, lr: float = 0.1, net: nn.Module | None = None) -> None:
        super().__init__(lr)
        self.save_hyperparameters(ignore=["net"])
        self.net = net
        self.hidden = nn.Linear(4, width)


def saved(module: TrainingModule, path: Path) -> TrainingModule:
    trainer = Trainer(**SETTINGS)
    trainer.fit(module, tiny_loader())
    trainer.save_checkpoint(path)
    return module


def test_the_module_is_made_with_its_hyperparameters_and_weights(tmp_path: Path):
    module = saved(Sized(width=5, lr=0.01), tmp_path / "x.ckpt")
    loaded = Sized.load_from_checkpoint(tmp_path / "x.ckpt")
    assert dict(loaded.hparams) == {"width": 5, "lr": 0.01}
    assert str(loaded.state_dict()) == str(module.state_dict())
    assert loaded.training


def test_arguments_win_over_what_was_saved(tmp_path: Path):
    saved(Sized(width=5), tmp_path / "x.ckpt")
    net = nn.Identity()
    loaded = Sized.load_from_checkpoint(tmp_path / "x.ckpt", lr=0.5, net=net)
    assert (loaded.lr, loaded.hparams.lr, loaded.hparams.width) == (0.5, 0.5, 5)
    assert loaded.net is net


def test_a_class_without_arguments_ignores_hyperparameters_it_does_not_take(tmp_path: Path):
    saved(Sized(width=5), tmp_path / "x.ckpt")

    class Narrow(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(4, 5)

    assert Narrow.load_from_checkpoint(tmp_path / "x.ckpt").lr == 0.1


def test_a_class_with_open_keywords_gets_all(tmp_path: Path):
    class Open(TinyModule):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.options = options

    saved(Open(depth=2), tmp_path / "x.ckpt")
    assert Open.load_from_checkpoint(tmp_path / "x.ckpt", more=3).options == {"depth": 2, "more": 3}


class Keywords(TinyModule):
    """Names one argument of its own; the others of its base go through ``**kwargs``."""

    def __init__(self, width: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.width = width


class DeepKeywords(Keywords):
    def __init__(self, depth: int = 1, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.depth = depth


class KeywordData(DataModule):
    def __init__(self, batch_size: int = 1, **kwargs: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size, self.lr = batch_size, kwargs.get("lr", 0.1)


@pytest.mark.parametrize("prefix", ["", "datamodule_"])
@pytest.mark.parametrize("name", ["kwargs", "args"])
def test_named_arguments_are_filled_from_the_file_and_the_rest_goes_through_the_open_keywords(
    prefix: str, name: str, tmp_path: Path
):
    kinds: list[Any] = [KeywordData] if prefix else [Keywords, DeepKeywords]
    own: dict[Any, dict[str, int]] = {KeywordData: {"batch_size": 3}, Keywords: {"width": 3}}
    own[DeepKeywords] = {"width": 3, "depth": 4}
    for kind in kinds:
        arguments = {"lr": 0.7, **own[kind]}
        content = {"state_dict": TinyModule().state_dict(), f"{prefix}hparams_name": name}
        single_file.write(content | {f"{prefix}hyper_parameters": dict(kind(**arguments).hparams)}, tmp_path / "x.ckpt")
        loaded = kind.load_from_checkpoint(tmp_path / "x.ckpt")
        assert {key: getattr(loaded, key) for key in arguments} == arguments == dict(loaded.hparams)
        assert kind.load_from_checkpoint(tmp_path / "x.ckpt", lr=0.5).lr == 0.5


class FromConfig(TinyModule):
    def __init__(self, conf: Any) -> None:
        super().__init__()
        self.save_hyperparameters(conf)
        self.width, self.rate = conf.width, conf.optimizer.lr


def test_one_configuration_object_comes_back_as_that_argument(tmp_path: Path):
    content = {
        "state_dict": TinyModule().state_dict(),
        "hparams_name": "conf",
        "hyper_parameters": {"width": 7, "optimizer": {"lr": 0.3}},
    }
    single_file.write(content, tmp_path / "x.ckpt")
    loaded = FromConfig.load_from_checkpoint(tmp_path / "x.ckpt")
    assert (loaded.width, loaded.rate) == (7, 0.3)
    assert FromConfig.load_from_checkpoint(tmp_path / "x.ckpt", width=8).width == 8
    own = SimpleNamespace(width=1, optimizer=SimpleNamespace(lr=0.0))
    with pytest.raises(TypeError, match="SimpleNamespace has no named entries"):
        FromConfig.load_from_checkpoint(tmp_path / "x.ckpt", conf=own)


def test_an_argument_that_does_not_exist_is_an_error_with_the_nearest_name(tmp_path: Path):
    saved(Sized(width=5), tmp_path / "x.ckpt")
    with pytest.raises(TypeError, match=r"Unknown Sized\.__init__ argument 'widht'\. Did you mean 'width'\?"):
        Sized.load_from_checkpoint(tmp_path / "x.ckpt", widht=3)


def test_an_argument_that_was_not_saved_is_asked_for(tmp_path: Path):
    class Needs(TinyModule):
        def __init__(self, net: nn.Module, depth: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="net")
            self.net = net

    saved(Needs(nn.Identity()), tmp_path / "x.ckpt")
    told = (
        r"Needs\.__init__ needs 'net', but of its arguments, the checkpoint stores only depth\."
        r".*load_from_checkpoint\(path, net=\.\.\.\), or use an argument that a checkpoint can store"
    )
    with pytest.raises(TypeError, match=told):
        Needs.load_from_checkpoint(tmp_path / "x.ckpt")
    assert isinstance(Needs.load_from_checkpoint(tmp_path / "x.ckpt", net=nn.Identity()), Needs)


def test_other_shapes_are_an_error_and_strict_false_loads_what_matches(tmp_path: Path):
    module = saved(Sized(width=5), tmp_path / "x.ckpt")
    with pytest.raises(
        RuntimeError, match=r"does not match Sized: 2 with a different shape \(hidden\.weight \(5, 4\) in the file"
    ):
        Sized.load_from_checkpoint(tmp_path / "x.ckpt", width=6)
    content = single_file.read(tmp_path / "x.ckpt")
    del content["state_dict"]["hidden.weight"]
    content["state_dict"]["gone"] = torch.zeros(1)
    single_file.write(content, tmp_path / "y.ckpt")
    with pytest.raises(RuntimeError, match=r"1 missing from the checkpoint \(hidden\.weight\); 1 unexpected \(gone\)"):
        Sized.load_from_checkpoint(tmp_path / "y.ckpt")
    with pytest.warns(
        UserWarning, match=r"partly loaded .*1 missing from the checkpoint \(hidden\.weight\); 1 unexpected \(gone\)"
    ):
        loaded = Sized.load_from_checkpoint(tmp_path / "y.ckpt", strict=False)
    assert torch.equal(loaded.layer.weight, module.layer.weight)


def test_loading_leaves_the_random_states_as_they_were(tmp_path: Path):
    saved(Sized(width=5), tmp_path / "x.ckpt")
    random.random()
    before = random_states()
    Sized.load_from_checkpoint(tmp_path / "x.ckpt")
    assert str(random_states()) == str(before)


def test_layers_of_configure_model_and_the_load_hook_come_before_the_weights(tmp_path: Path):
    class Late(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.late: Any = None

        def configure_model(self) -> None:
            if self.late is None:
                self.late = nn.Linear(2, 2)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert self.late is not None
            checkpoint["state_dict"]["late.bias"] = torch.full((2,), 9.0)

    saved(Late(), tmp_path / "x.ckpt")
    assert Late.load_from_checkpoint(tmp_path / "x.ckpt").late.bias.tolist() == [9.0, 9.0]


@pytest.mark.parametrize(
    ("name", "text"),
    [("h.csv", "key,value\nwidth,5\nlr,0.75\nnote,some text\n"), ("h.yaml", "width: 5\nlr: 0.75\nnote: some text\n")],
)
def test_a_file_of_hyperparameters_takes_the_place_of_those_saved(tmp_path: Path, name: str, text: str):
    saved(Sized(width=5), tmp_path / "x.ckpt")
    (tmp_path / name).write_text(text)
    loaded = Sized.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=tmp_path / name)
    assert (loaded.hparams.width, loaded.lr) == (5, 0.75)


def test_a_file_of_hyperparameters_of_another_kind_is_an_error(tmp_path: Path):
    saved(Sized(width=5), tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"h\.toml' has an unknown file type\. Pass a \.yaml, \.yml or \.csv"):
        Sized.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=tmp_path / "h.toml")


def test_a_yaml_file_cannot_run_code_either(tmp_path: Path):
    saved(Sized(width=5), tmp_path / "x.ckpt")
    (tmp_path / "h.yaml").write_text(f"width: !!python/object/apply:os.mkdir ['{tmp_path / 'ran'}']\n")
    with pytest.raises(Exception, match="could not determine a constructor"):
        Sized.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=tmp_path / "h.yaml")
    assert not (tmp_path / "ran").exists()


class Loss:
    """Notes that it was unpickled."""

    made: ClassVar[list[int]] = []

    def __init__(self, power: int) -> None:
        self.power = power

    def __setstate__(self, state: dict[str, int]) -> None:
        vars(self).update(state)
        self.made.append(self.power)


class WithLoss(TinyModule):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kept_loss = loss


def test_hyperparameters_that_are_objects_are_loaded_from_a_trusted_file_alone(tmp_path: Path):
    saved(WithLoss(Loss(3)), tmp_path / "x.ckpt")
    Loss.made.clear()  # of the copies that were made for the checkpoint
    problem = r"needs 'loss'. The checkpoint stores loss \(.*Loss\) as pickled objects.*weights_only=False"
    with pytest.raises(TypeError, match=problem):
        WithLoss.load_from_checkpoint(tmp_path / "x.ckpt")
    assert WithLoss.load_from_checkpoint(tmp_path / "x.ckpt", loss=4).kept_loss == 4
    assert Loss.made == []
    assert WithLoss.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False).kept_loss.power == 3
    assert set(Loss.made) == {3}
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["hyper_parameters"] == {}


def test_objects_whose_classes_the_program_allows_are_loaded_from_any_file(tmp_path: Path):
    saved(WithLoss({"main": Loss(3), "weights": torch.ones(2)}), tmp_path / "x.ckpt")
    with torch.serialization.safe_globals([Loss]):
        loss = WithLoss.load_from_checkpoint(tmp_path / "x.ckpt").kept_loss
    assert (loss["main"].power, loss["weights"].tolist()) == (3, [1, 1])


@pytest.mark.parametrize(("weights_only", "loaded"), [(None, True), (False, True), (True, False)])
def test_torchs_variable_decides_where_the_program_does_not(
    weights_only: bool | None, loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved(WithDefault(Loss(3)), tmp_path / "x.ckpt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with nullcontext() if loaded else pytest.warns(UserWarning, match="loads the checkpoint without its"):
        found = WithDefault.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=weights_only)
    assert isinstance(found.kept_loss, Loss) is loaded


def test_torchs_variable_can_forbid_to_load_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved(WithDefault(Loss(3)), tmp_path / "x.ckpt")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.warns(UserWarning, match="loads the checkpoint without its"):
        assert WithDefault.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False).kept_loss == 1


def test_objects_with_tensors_of_a_gpu_are_loaded_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        saved(WithLoss([torch.ones(2), Loss(3)]), tmp_path / "x.ckpt")
    assert WithLoss.load_from_checkpoint(tmp_path / "x.ckpt", loss=4).kept_loss == 4
    loss = WithLoss.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False).kept_loss
    assert loss[0].device.type == "cpu"


class WithDefault(TinyModule):
    def __init__(self, loss: Any = 1, power: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kept_loss = loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = Loss(2)


class DataWithDefault(DataModule):
    def __init__(self, loss: Any = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kept_loss = loss

    def train_dataloader(self) -> Any:
        return tiny_loader()


class WithoutLoss(TinyModule):
    """A class that does not take the saved hyperparameter."""


def test_a_safe_load_names_each_object_that_it_leaves_out(tmp_path: Path):
    trainer = Trainer(**SETTINGS)
    trainer.fit(WithDefault(Loss(3)), DataWithDefault(Loss(3)))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    told = r"without its 'loss \(.*Loss\)' and 'added \(.*Loss\)'.*created without 'loss', so.*weights_only=False\)"
    with pytest.warns(UserWarning, match=told):
        assert WithDefault.load_from_checkpoint(tmp_path / "x.ckpt").kept_loss == 1
    with pytest.warns(UserWarning, match=r"without its 'loss \(.*Loss\)', because.*created without 'loss'"):
        assert DataWithDefault.load_from_checkpoint(tmp_path / "x.ckpt").kept_loss == 1
    with pytest.warns(UserWarning, match=r"without its 'added \(.*Loss\)', because .* If you trust") as shown:
        WithoutLoss.load_from_checkpoint(tmp_path / "x.ckpt")
    assert not any("created" in str(one.message) for one in shown)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DataWithDefault.load_from_checkpoint(tmp_path / "x.ckpt", loss=4).kept_loss == 4
        assert WithDefault.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False).kept_loss.power == 3


def test_a_classes_name_in_the_hyperparameters_is_not_looked_up(tmp_path: Path):
    content = {
        "state_dict": TinyModule().state_dict(),
        "hyper_parameters": {"lr": 0.2, "_class_path": "os.system"},
    }
    single_file.write(content, tmp_path / "x.ckpt")
    assert TinyModule.load_from_checkpoint(tmp_path / "x.ckpt").lr == 0.2


def test_weights_can_go_to_another_device(tmp_path: Path):
    saved(Sized(width=5), tmp_path / "x.ckpt")
    assert Sized.load_from_checkpoint(tmp_path / "x.ckpt").device.type == "cpu"

    class OnMeta(Sized):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict(state_dict, *args, **{**kwargs, "assign": True})

    loaded = OnMeta.load_from_checkpoint(tmp_path / "x.ckpt", map_location="meta")
    assert {parameter.device.type for parameter in loaded.parameters()} == {"meta"}


@pytest.mark.gpu
def test_weights_saved_on_a_gpu_load_on_the_cpu_or_there(tmp_path: Path):
    trainer = Trainer(**{**SETTINGS, "accelerator": "cuda"})
    trainer.fit(Sized(width=5), tiny_loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert Sized.load_from_checkpoint(tmp_path / "x.ckpt").layer.weight.device.type == "cpu"
    loaded = Sized.load_from_checkpoint(tmp_path / "x.ckpt", map_location="cuda")
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cuda"}


def test_a_file_with_no_data_module_state_still_makes_one(tmp_path: Path):
    class Data(DataModule):
        def __init__(self, batch_size: int = 1) -> None:
            super().__init__()
            self.batch_size = batch_size

    content = {"state_dict": {}, "datamodule_hparams_name": "kwargs", "datamodule_hyper_parameters": {"batch_size": 6}}
    single_file.write(content, tmp_path / "x.ckpt")
    assert Data.load_from_checkpoint(tmp_path / "x.ckpt").batch_size == 6


@pytest.mark.parametrize("own", [None, True, False])
@pytest.mark.parametrize("strict", [None, True, False])
def test_names_must_match_unless_the_argument_or_else_the_module_says_otherwise(
    strict: bool | None, own: bool | None, tmp_path: Path
):
    class Larger(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.strict_loading = own
            self.extra = nn.Linear(1, 1)

    single_file.write({"epoch": 0, "global_step": 0, "state_dict": TinyModule().state_dict()}, tmp_path / "x.ckpt")
    if strict is not None and own is (not strict):
        with pytest.raises(ValueError, match=f"strict={strict}.* contradicts strict_loading={own}, which Larger sets"):
            Larger.load_from_checkpoint(tmp_path / "x.ckpt", strict=strict)
    elif strict is False or (strict is None and own is False):
        with pytest.warns(UserWarning, match="only partly loaded"):
            assert Larger.load_from_checkpoint(tmp_path / "x.ckpt", strict=strict).extra is not None
    else:
        with pytest.raises(RuntimeError, match="2 missing from the checkpoint"):
            Larger.load_from_checkpoint(tmp_path / "x.ckpt", strict=strict)


def test_a_file_that_names_a_function_to_make_the_module_with_is_refused(tmp_path: Path):
    torch.save({"state_dict": {}, "hyper_parameters": {"_instantiator": "os.system"}}, tmp_path / "x.ckpt")
    with pytest.raises(
        ValueError, match=r"'os\.system' as the function that creates the module. The function was not called"
    ):
        TinyModule.load_from_checkpoint(tmp_path / "x.ckpt", strict=False)


@pytest.mark.parametrize("key", ["hparams", "module_arguments"])
def test_hyperparameters_of_early_versions_of_lightning_are_found(key: str, tmp_path: Path) -> None:
    module = Sized(width=3, lr=0.5)
    old = {"pytorch-lightning_version": "0.9.0", "state_dict": module.state_dict(), key: {"width": 3, "lr": 0.5}}
    torch.save({"epoch": 1, "global_step": 3, **old}, tmp_path / "x.ckpt")
    assert Sized.load_from_checkpoint(tmp_path / "x.ckpt").lr == 0.5
    torch.save({"epoch": 1, "global_step": 3, **old, "pytorch-lightning_version": "2.6.0"}, tmp_path / "new.ckpt")
    assert Sized.load_from_checkpoint(tmp_path / "new.ckpt", width=3).lr == Sized(width=3).lr


@pytest.mark.parametrize("made", [TinyModule(), DataModule()])
def test_it_cannot_be_called_on_an_object_which_it_would_not_change(made: Any) -> None:
    with pytest.raises(TypeError, match=rf"on the class: {type(made).__name__}\.load_from_checkpoint"):
        made.load_from_checkpoint("x.ckpt")
