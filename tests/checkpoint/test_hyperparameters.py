from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
import warnings
from argparse import Namespace
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch import nn

from paceline import Trainer, messages
from paceline.checkpoint.hyperparameters import AttributeDict, HyperparametersMixin
from paceline.loggers import CSVLogger


class Plain(HyperparametersMixin):
    def __init__(self, lr: float, *layers: int, width: int = 3, **rest: Any) -> None:
        self.save_hyperparameters()


class Base(HyperparametersMixin):
    def __init__(self, lr: float = 0.1, net: Any = None) -> None:
        self.save_hyperparameters(ignore="net")


class Child(Base):
    def __init__(self, depth: int, lr: float = 0.5) -> None:
        super().__init__(lr=lr * 2, net="a net")


class Grandchild(Child):
    def __init__(self, depth: int, extra: str = "e", **kwargs: Any) -> None:
        super().__init__(depth + 1, **kwargs)
        self.save_hyperparameters("extra", logger=False)


def test_arguments_keywords_and_defaults_are_kept_and_positional_rest_is_not():
    assert Plain(0.1, 4, 5, depth=2).hparams == {"lr": 0.1, "width": 3, "depth": 2}


def test_a_call_in_the_base_keeps_the_arguments_of_subclasses_whose_values_win():
    assert Child(7).hparams == {"depth": 7, "lr": 0.5}


def test_calls_in_base_and_subclass_add_up():
    module = Grandchild(1, lr=2.0)
    assert module.hparams == {"depth": 1, "lr": 2.0, "extra": "e"}
    assert module._log_hyperparams is False
    assert Child(1)._log_hyperparams is True


def test_a_call_in_the_subclass_after_the_bases_constructor_works():
    class Quiet(HyperparametersMixin):
        def __init__(self, a: int) -> None:
            pass

    class Loud(Quiet):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a + 1)
            self.save_hyperparameters()

    assert Loud(1, 2).hparams == {"a": 1, "b": 2}


def test_a_helper_method_of_the_constructor_may_make_the_call():
    class Helped(HyperparametersMixin):
        def __init__(self, a: int) -> None:
            self._remember()

        def _remember(self) -> None:
            self.save_hyperparameters()

    assert Helped(3).hparams == {"a": 3}


def test_arguments_that_a_closure_captures_are_kept():
    class Captured(HyperparametersMixin):
        def __init__(self, a: int) -> None:
            self.get = lambda: a
            self.save_hyperparameters()

    assert Captured(3).hparams == {"a": 3}


def test_constructors_of_other_objects_on_the_way_are_left_out():
    class Owner:
        def __init__(self, secret: int) -> None:
            self.module = Base(lr=1.0)

    assert Owner(5).module.hparams == {"lr": 1.0}


def test_a_module_and_a_dataclass_module_keep_their_arguments():
    class Net(HyperparametersMixin, nn.Module):
        def __init__(self, width: int) -> None:
            self.save_hyperparameters()
            super().__init__()
            self.layer = nn.Linear(width, 1)

    @dataclasses.dataclass
    class Data(HyperparametersMixin):
        size: int
        name: str = "n"

        def __post_init__(self) -> None:
            self.save_hyperparameters()

    net = Net(4)
    assert net.hparams.width == 4
    assert list(net.state_dict()) == ["layer.weight", "layer.bias"]
    assert copy.deepcopy(net).hparams == {"width": 4}
    assert Data(2).hparams == {"size": 2, "name": "n"}


def test_names_choose_arguments():
    class Chosen(HyperparametersMixin):
        def __init__(self, a: int, b: int, c: int) -> None:
            self.save_hyperparameters("a", "c")

    assert Chosen(1, 2, 3).hparams == {"a": 1, "c": 3}


def test_an_unknown_name_is_an_error_with_the_nearest_one():
    class Wrong(HyperparametersMixin):
        def __init__(self, learning_rate: float) -> None:
            self.save_hyperparameters("learning_rat")

    with pytest.raises(ValueError, match=r"Wrong.__init__ argument 'learning_rat'. Did you mean 'learning_rate'\?"):
        Wrong(0.1)


def test_ignored_arguments_are_left_out():
    class Ignoring(HyperparametersMixin):
        def __init__(self, a: int, b: int, c: int) -> None:
            self.save_hyperparameters(ignore=["a", "b"])

    module = Ignoring(1, 2, 3)
    assert module.hparams == {"c": 3}
    module.remove_ignored_hparams(["c", "d"])
    assert module.hparams == module.hparams_initial == {}


def test_a_subclass_ignores_what_its_base_class_stored():
    class Two(HyperparametersMixin):
        def __init__(self, a: int = 1, b: int = 2) -> None:
            self.save_hyperparameters()

    class Three(Two):
        def __init__(self, a: int = 1, b: int = 2, c: int = 3) -> None:
            super().__init__(a, b)
            self.save_hyperparameters(ignore=["b"])

    assert dict(Three().hparams) == dict(Three().hparams_initial) == {"a": 1, "c": 3}


def test_a_misspelled_name_to_ignore_is_pointed_out():
    class Typo(HyperparametersMixin):
        def __init__(self, backbone: Any, lr: float) -> None:
            self.save_hyperparameters(ignore=["backbon", "elsewhere"])

    messages.forget()
    with pytest.warns(
        messages.PacelineWarning, match=r"there is no argument 'backbon' to ignore. Did you mean 'backbone'\?"
    ) as seen:
        Typo(1, 2)
    assert len(seen) == 1


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    layers: tuple[int, ...] = (1, 2)


@pytest.mark.parametrize(
    "config",
    [{"lr": 0.1, "layers": (1, 2)}, Namespace(lr=0.1, layers=(1, 2)), Config(), AttributeDict(lr=0.1, layers=(1, 2))],
)
def test_the_entries_of_a_configuration_object_are_kept_and_its_argument_is_known(config):
    class Configured(HyperparametersMixin):
        def __init__(self, other: int, conf: Any) -> None:
            self.save_hyperparameters(conf)

    module = Configured(1, config)
    assert module.hparams == {"lr": 0.1, "layers": (1, 2)}
    assert module._hparams_name == "conf"
    assert Child(1)._hparams_name == "kwargs"
    module.hparams.lr = 5
    assert (config["lr"] if isinstance(config, dict) else config.lr) == 0.1


def test_objects_and_names_can_be_mixed():
    class Mixed(HyperparametersMixin):
        def __init__(self, a: int, conf: Any) -> None:
            self.save_hyperparameters(conf, "a")

    module = Mixed(1, {"b": 2})
    assert module.hparams == {"a": 1, "b": 2}
    assert module._hparams_name == "kwargs"


def test_an_omegaconf_config_stays_one_with_its_interpolations_and_is_plain_in_a_checkpoint(quiet, tmp_path):
    omegaconf = pytest.importorskip("omegaconf")

    class Configured(TinyModule):
        def __init__(self, conf: Any) -> None:
            super().__init__()
            self.save_hyperparameters(conf, ignore="apart")

    class Named(TinyModule):
        def __init__(self, model: Any, double: int) -> None:
            super().__init__()
            self.save_hyperparameters(omegaconf.OmegaConf.create({"model": model, "double": double}))

    conf = omegaconf.OmegaConf.create({"model": {"width": 3}, "double": "${model.width}", "apart": 1})
    module = Configured(conf)
    module.hparams.model.width = 4
    assert (module.hparams.double, module.hparams_initial.double, conf.double) == (4, 3, 3)
    assert "apart" not in module.hparams
    quiet["logger"] = CSVLogger(tmp_path)
    trainer = Trainer(**quiet, max_epochs=1)
    trainer.fit(module, tiny_loader(1))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    held = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert held["hyper_parameters"] == {"model": {"width": 4}, "double": "${model.width}"}
    loaded = Configured.load_from_checkpoint(tmp_path / "x.ckpt").hparams
    assert isinstance(loaded, omegaconf.DictConfig)
    assert loaded.double == 4
    assert isinstance(Named.load_from_checkpoint(tmp_path / "x.ckpt").hparams.model, omegaconf.DictConfig)
    assert trainer.logger.hparams == {"model": {"width": 3}, "double": 3}


def test_further_hyperparameters_beside_a_config_make_it_plain():
    omegaconf = pytest.importorskip("omegaconf")

    class Mixed(HyperparametersMixin):
        def __init__(self, conf: Any, lr: float) -> None:
            self.save_hyperparameters(conf)
            self.save_hyperparameters("lr")

    hparams = Mixed(omegaconf.OmegaConf.create({"a": {"b": 1}, "c": "${a.b}"}), 0.5).hparams
    assert hparams == {"a": {"b": 1}, "c": 1, "lr": 0.5}
    assert hparams.a.b == 1


@pytest.mark.parametrize("wrong", [5, [1, 2], torch.zeros(1), Config])
def test_an_object_without_entries_is_refused(wrong):
    class Configured(HyperparametersMixin):
        def __init__(self, conf: Any) -> None:
            self.save_hyperparameters(conf)

    with pytest.raises(TypeError, match=r"Configured.save_hyperparameters.*no named entries"):
        Configured(wrong)


def test_outside_of_a_constructor_only_explicit_entries_can_be_kept():
    class Late(HyperparametersMixin):
        pass

    late = Late()
    with pytest.raises(RuntimeError, match=r"Late.save_hyperparameters\(\) was called outside of __init__"):
        late.save_hyperparameters()
    with pytest.raises(RuntimeError, match="outside of __init__"):
        late.save_hyperparameters("lr")
    late.save_hyperparameters({"lr": 1})
    assert late.hparams == {"lr": 1}


def test_a_constructor_without_arguments_keeps_nothing():
    class Empty(HyperparametersMixin):
        def __init__(self) -> None:
            self.save_hyperparameters()

    assert Empty().hparams == {}


def test_the_initial_values_stay_when_hyperparameters_change():
    module = Base(lr=[1])  # type: ignore[arg-type]
    module.hparams.lr.append(2)
    module.hparams.new = 3
    assert module.hparams_initial == {"lr": [1]}
    module.hparams_initial["lr"].append(9)
    assert module.hparams_initial == {"lr": [1]}


def test_a_value_that_cannot_be_copied_is_kept_by_reference():
    lock = threading.Lock()
    graph = (torch.ones(1, requires_grad=True) * 2,)
    module = Plain(0.1, lock=lock, graph=graph, good=[1])
    initial = module.hparams_initial
    assert initial.lock is lock
    assert initial.graph is graph
    assert initial.good == [1]
    assert initial.good is not module.hparams.good


def test_a_module_among_the_arguments_is_told_once_and_not_copied():
    messages.forget()
    net = nn.Linear(2, 2)
    with pytest.warns(messages.PacelineWarning, match=r"are modules: 'net'.*Exclude them.*ignore=\['net'\]"):
        module = Plain(0.1, net=net)
    assert module.hparams_initial.net is net
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Plain(0.1, net=net)


def test_there_are_no_hyperparameters_before_they_are_saved():
    class Nothing(HyperparametersMixin):
        pass

    nothing = Nothing()
    assert nothing.hparams == nothing.hparams_initial == {}
    assert nothing._log_hyperparams is False
    nothing.hparams.x = 1
    assert nothing.hparams == {"x": 1}
    assert Nothing().hparams == {}


def test_entries_are_attributes():
    hparams = AttributeDict(lr=0.1, width=3)
    hparams.depth = 4
    del hparams.width
    assert hparams == {"lr": 0.1, "depth": 4}
    assert repr(hparams) == "lr:    0.1\ndepth: 4"
    assert repr(AttributeDict()) == ""
    with pytest.raises(
        AttributeError, match=r"no hyperparameter 'dept'. Did you mean 'depth'\? Hyperparameters: 'lr' and 'depth'"
    ):
        _ = hparams.dept
    with pytest.raises(AttributeError, match="no hyperparameter 'nope' to delete"):
        del hparams.nope


def test_attribute_dicts_can_be_copied_and_pickled():
    hparams = AttributeDict(lr=0.1, inner=AttributeDict(a=[1]))
    for clone in (copy.deepcopy(hparams), pickle.loads(pickle.dumps(hparams))):
        assert type(clone) is AttributeDict
        assert clone.inner.a == [1]
