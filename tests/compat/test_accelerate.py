"""Programs written for Accelerate, on Paceline: which names there are, and loops in the shapes that its pages show."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import compat
from paceline.accelerator.loaders import PreparedLoader
from paceline.accelerator.process_state import AcceleratorState
from paceline.compat import finder
from paceline.compat.accelerate import names

HERE = Path(__file__).parent
LINES = torch.tensor([[1.0], [-2.0], [3.0]])

#: What transformers 5 imports.
BY_TRANSFORMERS = {
    "": "Accelerator skip_first_batches PartialState ParallelismConfig dispatch_model init_empty_weights "
    "cpu_offload_with_hook",
    "state": "AcceleratorState PartialState",
    "parallelism_config": "ParallelismConfig",
    "hooks": "add_hook_to_module remove_hook_from_module AlignDevicesHook",
    "commands.config": "default_config_file load_config_from_file",
    "utils": "DataLoaderConfiguration DistributedDataParallelKwargs DistributedType GradientAccumulationPlugin "
    "load_fsdp_model load_fsdp_optimizer release_memory save_fsdp_model save_fsdp_optimizer reduce "
    "extract_model_from_parallel get_balanced_memory infer_auto_device_map get_max_memory find_executable_batch_size "
    "TorchDynamoPlugin FullyShardedDataParallelPlugin DeepSpeedPlugin DummyOptim DummyScheduler",
    "utils.memory": "clear_device_cache should_reduce_batch_size release_memory",
    "utils.modeling": "clean_device_map get_max_layer_size",
    "utils.constants": "FSDP_AUTO_WRAP_POLICY FSDP_SHARDING_STRATEGY",
    "utils.imports": "is_fp8_available",
    "utils.deepspeed": "HfDeepSpeedConfig",
}


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The alias, for one test."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(names.PACKAGE, "check_early", ())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for variable in (compat.VARIABLE, "PYTHONPATH"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    compat.install("accelerate")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield importlib.import_module("accelerate")
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        del sys.modules[name]
    AcceleratorState._reset_state(reset_partial_state=True)


def run(*command: str, limit: float = 120) -> str:
    environ = {**os.environ, "PYTHONPATH": f"{HERE.parents[2]}{os.pathsep}{HERE.parents[0]}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- transformers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What transformers.Trainer did in a process of its own."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("transformers")
    said = run(str(HERE / "transformers_program.py"), str(folder))
    return json.loads(said.rpartition("FOUND ")[2])


def test_b17_transformers_trainer_runs_with_paceline_as_its_accelerate(found: dict[str, Any]) -> None:
    assert found["file"] == finder.__file__
    assert found["real"] == []
    assert found["kind"] == "paceline.accelerator.accelerator"


def test_b17_transformers_trainer_ends_with_the_weights_of_a_hand_written_loop(found: dict[str, Any]) -> None:
    assert found["steps"] == [6, 6]
    assert found["trained"]
    assert found["same"]


def test_b17_transformers_trainer_evaluates_each_sample_once(found: dict[str, Any]) -> None:
    assert found["eval"][0] == pytest.approx(found["eval"][1], rel=1e-5)
    assert found["rows"] == 10


def test_b17_transformers_trainer_resumes_to_the_same_bits(found: dict[str, Any]) -> None:
    assert found["differs"]
    assert found["resumed"]


def test_b17_transformers_trainer_learns_on_two_processes_what_it_learns_on_one(found: dict[str, Any]) -> None:
    assert found["apart"] < 1e-6
    assert found["eval_spread"] == pytest.approx([found["eval_spread"][0]] * 3, rel=1e-5)


def test_b17_transformers_trainer_shards_saves_and_resumes(found: dict[str, Any]) -> None:
    assert found["sharded_apart"] < 1e-5
    assert found["sharded_resumed"]


# ---- names -----------------------------------------------------------------------------------------------------------


def test_every_name_can_be_imported(accelerate: Any) -> None:
    module = importlib.import_module("accelerate.utils")
    for name in names.ALL:
        assert hasattr(module, name), name
    assert set(dir(module)) >= set(names.ALL) - set(names.UNSUPPORTED)
    assert {"FSDP_MODEL_NAME", "is_cuda_available", "Accelerator"} <= set(module.__all__)
    assert "MegatronEngine" not in module.__all__


def test_every_name_that_transformers_imports_is_there(accelerate: Any) -> None:
    for place, listed in BY_TRANSFORMERS.items():
        module = importlib.import_module(f"accelerate.{place}".rstrip("."))
        for name in listed.split():
            assert hasattr(module, name), f"{place}.{name}"


def test_names_are_pacelines_objects(accelerate: Any) -> None:
    from accelerate.utils import DistributedType, set_seed  # type: ignore[reportMissingImports]

    assert set_seed is paceline.set_seed
    assert DistributedType is paceline.DistributedType
    assert issubclass(accelerate.Accelerator, paceline.Accelerator)
    assert accelerate.PartialState is paceline.PartialState
    assert issubclass(importlib.import_module("accelerate.data_loader").DataLoaderShard, PreparedLoader)


def test_the_package_looks_installed(accelerate: Any) -> None:
    assert accelerate.__version__ == importlib.metadata.version("accelerate") == names.VERSION
    spec = importlib.util.find_spec("accelerate.utils")
    assert spec is not None
    assert spec.origin == finder.__file__
    assert spec.name == "accelerate.utils"
    assert "huggingface" in importlib.metadata.metadata("accelerate")["Home-page"]  # which libraries look for


def test_a_function_is_not_hidden_by_the_submodule_of_its_name(accelerate: Any) -> None:
    utils = importlib.import_module("accelerate.utils")
    inner = importlib.import_module("accelerate.utils.tqdm")
    assert utils.tqdm is inner.tqdm
    assert callable(utils.tqdm)
    assert utils.memory is importlib.import_module("accelerate.utils.memory")


def test_what_accelerate_does_not_have_is_not_there(accelerate: Any) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("accelerate.nothing")
    with pytest.raises(AttributeError, match=r"has no replacement for this name\. Did you mean 'Accelerator'\?"):
        _ = accelerate.Acelerator
    with pytest.raises(ImportError, match="accelerate"):
        exec("from accelerate import nothing")


def test_what_paceline_leaves_out_can_be_imported_and_says_so_when_it_is_called(accelerate: Any) -> None:
    class Own(accelerate.utils.MegatronEngine):
        pass

    for name in names.UNSUPPORTED:
        with pytest.raises(NotImplementedError, match=rf"^{name} is not available: [^\n]+\.$"):
            getattr(accelerate, name)()
    with pytest.raises(NotImplementedError):
        Own()
    assert not isinstance(nn.Linear(1, 1), accelerate.utils.AbstractTrainStep)


def test_install_refuses_to_mix_with_the_real_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if not isinstance(one, finder.Finder)])
    monkeypatch.setitem(sys.modules, "accelerate", json)
    with pytest.raises(
        RuntimeError, match=re.escape(f"already been imported, from {json.__file__}. Call compat.install before")
    ):
        compat.install("accelerate")


def test_install_warns_of_libraries_that_have_looked_already(accelerate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compat.install("accelerate")  # the second time does nothing
    assert sum(isinstance(one, finder.Finder) for one in sys.meta_path) == 1
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if not isinstance(one, finder.Finder)])
    del sys.modules["accelerate"]  # for good: put back later it would look like the package to every other test
    monkeypatch.setattr(names.PACKAGE, "check_early", ("json", "surely_not_imported"))
    with pytest.warns(match="was called after importing 'json', which may"):
        compat.install("accelerate")


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("rate = 0.5\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nimport torch\nfrom accelerate import Accelerator\nfrom beside import rate\n"
        "accelerator = Accelerator(cpu=True)\nmodel = torch.nn.Linear(1, 1)\n"
        "model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), rate))\n"
        "before = model.weight.item()\naccelerator.backward(model(torch.ones(1, 1)).sum())\noptimizer.step()\n"
        "print(__name__, sys.argv[1:], round(before - model.weight.item(), 4))\n"
    )
    for program in (["paceline.compat", "accelerate"], ["paceline.compat.accelerate"]):
        said = run("-m", *program, str(script), "--a", "1")
        assert said.splitlines()[-1] == "__main__ ['--a', '1'] 0.5"


def test_processes_that_a_program_starts_find_it_and_only_it(tmp_path: Path) -> None:
    code = "import sys, accelerate; print(accelerate.__doc__); import lightning"
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "PACELINE_STANDS_IN": ""}
    start = (
        "import subprocess, sys\nfrom paceline.accelerator import compat\ncompat.install()\n"
        f"done = subprocess.run([sys.executable, '-c', {code!r}], capture_output=True, text=True)\n"
        "print(done.stdout, done.stderr.splitlines()[-1])"
    )
    done = subprocess.run([sys.executable, "-c", start], env=environ, capture_output=True, text=True)
    assert "accelerate, by Paceline." in done.stdout, done.stderr
    assert "No module named 'lightning'" in done.stdout
    assert 'is now paceline.compat.install("accelerate")' in done.stderr


# ---- loops -----------------------------------------------------------------------------------------------------------


def data(count: int) -> TensorDataset:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x @ LINES)


def test_a_loop_with_a_plugin_for_accumulation_steps_as_one_with_large_batches(accelerate: Any) -> None:
    from accelerate.utils import GradientAccumulationPlugin, set_seed  # type: ignore[reportMissingImports]

    def train(steps: int, size: int) -> Tensor:
        set_seed(3)
        plugin = GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=False)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = DataLoader(data(16), size, shuffle=True)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        assert accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] is False
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return accelerator.unwrap_model(model).weight.detach()

    torch.testing.assert_close(train(4, 2), train(1, 8))


def test_an_evaluation_gathers_each_sample_once_and_a_row_for_each_place(accelerate: Any) -> None:
    def evaluate() -> Any:
        accelerator = accelerate.Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(data(9), 4))
        rows, losses = [], []
        for number, (x, _) in enumerate(loader):
            rows.append(accelerator.gather_for_metrics(x[:, 0]))
            losses.append(accelerator.gather_for_metrics(torch.tensor(float(number)).repeat(4)))
        return torch.cat(rows), torch.cat(losses)

    expected = data(9).tensors[0][:, 0]
    rows, losses = evaluate()
    assert torch.equal(rows, expected)
    assert losses.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0]
    for rows, losses in ranks(2, evaluate):
        assert sorted(rows.tolist()) == sorted(expected.tolist())
        assert len(losses) == 9


def test_a_loop_with_a_tracker_logs_through_it(accelerate: Any) -> None:
    from accelerate.tracking import GeneralTracker, on_main_process  # type: ignore[reportMissingImports]

    class Kept(GeneralTracker):
        name = "kept"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.values: list[Any] = []

        @property
        def tracker(self) -> list[Any]:
            return self.values

        @on_main_process
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.values.append(values)

        @on_main_process
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.values.append((step, values))

    accelerator = accelerate.Accelerator(cpu=True, log_with=Kept())
    accelerator.init_trackers("project", config={"rate": 0.1})
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.end_training()
    assert accelerator.get_tracker("kept", unwrap=True) == [{"rate": 0.1}, (3, {"loss": 1.0})]


def test_a_loop_without_trackers_logs_nothing(accelerate: Any, tmp_path: Path) -> None:
    without = accelerate.Accelerator(cpu=True)
    without.log({"loss": 1.0}, step=0)
    without.end_training()
    without.log({"loss": 1.0}, step=1)
    with pytest.raises(ValueError, match="log_with='tensorboard'"):
        without.get_tracker("tensorboard")
    early = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    with pytest.warns(UserWarning, match="before init_trackers has no effect"):
        early.log({"loss": 1.0}, step=0)
    with pytest.raises(ValueError, match="init_trackers"):
        early.get_tracker("tensorboard")
    assert not list(tmp_path.iterdir())


def test_a_loop_that_fetches_ahead_and_sets_when_to_sync_weighs_its_losses_itself(accelerate: Any) -> None:
    def train() -> tuple[list[float], float]:
        accelerator = accelerate.Accelerator(cpu=True)
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        loader = DataLoader(TensorDataset(torch.arange(1.0, 6.0).unsqueeze(1)), 2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0), loader)
        iterator = iter(loader)
        batches = [next(iterator)[0] for _ in range(len(loader))]
        items = accelerator.gather(torch.tensor(sum(map(len, batches)))).sum()
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            accelerator.gradient_state._set_sync_gradients(last)
            with accelerator.no_sync(model) if not last else torch.enable_grad():
                accelerator.backward(model(batch).sum() / items * accelerator.num_processes)
        optimizer.step()
        return [x for batch in batches for x in batch.flatten().tolist()], model.weight.item()

    for seen in [[train()], ranks(2, train)]:
        everything = [x for part, _ in seen for x in part]
        for _, weight in seen:
            assert weight == pytest.approx(-sum(everything) / len(everything))


# ---- small things ----------------------------------------------------------------------------------------------------


def test_functions_without_an_accelerator_speak_for_all_processes(accelerate: Any) -> None:
    from accelerate import utils  # type: ignore[reportMissingImports]

    def talk() -> Any:
        rank = accelerate.PartialState(cpu=True).process_index
        tensor = torch.tensor([float(rank)])
        utils.wait_for_everyone()
        utils.save({"rank": rank}, "saved.pt")
        loader = accelerate.data_loader.prepare_data_loader(DataLoader(data(8), 2), put_on_device=True)
        utils.wait_for_everyone()
        return (
            utils.gather(tensor).tolist(),
            utils.gather_object([rank]),
            utils.broadcast(tensor, from_process=1).item(),
            utils.broadcast_object_list([rank]),
            utils.reduce(tensor).item(),
            utils.reduce(tensor, "sum").item(),
            utils.pad_across_processes(torch.ones(rank + 1)).shape[0],
            utils.copy_tensor_to_devices(tensor if rank == 0 else None).item(),
            utils.load("saved.pt"),
            len(loader),
        )

    assert ranks(2, talk) == [([0.0, 1.0], [0, 1], 1.0, [0], 0.5, 1.0, 2, 0.0, {"rank": 0}, 2)] * 2


def test_states_say_whether_there_is_one(accelerate: Any) -> None:
    from accelerate.state import AcceleratorState, PartialState  # type: ignore[reportMissingImports]

    assert PartialState._shared_state == {}
    assert AcceleratorState._shared_state == {}
    first = PartialState(cpu=True)
    assert PartialState._shared_state != {}
    accelerator = accelerate.Accelerator()
    assert AcceleratorState._shared_state
    assert accelerator.device.type == "cpu"
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not first.initialized
    PartialState(cpu=True)
    assert first.initialized
    assert first.num_processes == 1
    assert accelerator.distributed_type == "NO"


def test_a_gradient_state_is_that_of_the_accelerator_made_last(accelerate: Any) -> None:
    from accelerate.state import GradientState  # type: ignore[reportMissingImports]

    first = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    second = accelerate.Accelerator(cpu=True)
    assert GradientState() is second.gradient_state
    assert isinstance(first.gradient_state, GradientState)
    assert first.gradient_state.num_steps == 4
    assert "mixed_precision" in inspect.signature(accelerate.Accelerator).parameters
    kept = second.gradient_state
    del first, second
    gc.collect()
    assert GradientState() is kept
    del kept
    gc.collect()
    assert GradientState().num_steps == 1


def test_an_accelerator_stays_where_a_partial_state_was_asked_to_stay(accelerate: Any) -> None:
    assert accelerate.Accelerator().settings["cpu"] is not True
    accelerate.PartialState(cpu=True)
    assert accelerate.Accelerator().settings["cpu"] is True


def test_probes_tell_what_is_installed(accelerate: Any) -> None:
    from accelerate.utils import imports  # type: ignore[reportMissingImports]

    assert imports.is_rich_available()
    assert imports.is_tensorboard_available()
    assert imports.is_aim_available() is (importlib.util.find_spec("aim") is not None)
    assert imports.is_cuda_available() is torch.cuda.is_available()
    assert imports.is_bf16_available(True)
    assert not imports.is_torch_xla_available(check_is_tpu=True)
    assert not imports.is_peft_model(nn.Linear(1, 1))


def test_values_environment_and_versions(accelerate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import utils  # type: ignore[reportMissingImports]

    assert [utils.convert_bytes(n) for n in (12, 1280, 5 * 2**40)] == ["12 bytes", "1.25 KB", "5.0 TB"]
    assert utils.convert_file_size_to_int("1KB") == 1000
    assert [utils.dtype_byte_size(d) for d in (torch.bfloat16, torch.bool, utils.CustomDtype.INT4)] == [2, 0.125, 0.5]
    assert utils.merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"c": 2, "b": 1}}
    assert utils.recursive_getattr(nn.Sequential(nn.Linear(2, 3)), "0.weight").shape == (3, 2)
    assert [utils.get_pretty_name(x) for x in (nn.Linear, nn.Linear(1, 1), run)] == ["Linear", "Linear", "run"]
    assert (utils.compare_versions("2.10.0", ">", "2.9"), utils.compare_versions("torch", "<", "1")) == (True, False)
    assert utils.is_torch_version(">=", "2.11")
    with pytest.raises(ValueError, match="operation"):
        utils.compare_versions("1", "~", "2")
    monkeypatch.setenv("KEPT", "yes")
    with utils.patch_environment(kept="no", new=3):
        assert (os.environ["KEPT"], os.environ["NEW"]) == ("no", "3")
        assert not utils.parse_flag_from_env("KEPT")
        assert utils.get_int_from_env(["NOTHING", "NEW"], 1) == 3
    assert (os.environ["KEPT"], "NEW" in os.environ) == ("yes", False)
    with utils.clear_environment():
        os.environ["NEW"] = "1"
    assert (os.environ["KEPT"], "NEW" in os.environ) == ("yes", False)
    assert utils.purge_accelerate_environment(os.environ.__setitem__)("ACCELERATE_X", "1") is None
    assert "ACCELERATE_X" not in os.environ
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]
        assert not utils.is_port_in_use(port)
        server.listen()
        assert utils.is_port_in_use(port)


def test_models_and_weights(accelerate: Any) -> None:
    from accelerate import utils  # type: ignore[reportMissingImports]

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    compiled: Any = torch.compile(model, backend="eager")
    assert utils.is_compiled_module(compiled)
    assert utils.extract_model_from_parallel(compiled) is compiled
    assert utils.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    assert utils.extract_model_from_parallel(nn.DataParallel(model)) is model
    assert [name for name, _ in utils.get_module_children_bottom_up(model, return_fqns=True)] == ["0", "1.0", "1", ""]
    assert not utils.has_compiled_regions(model)
    assert not utils.model_has_dtensor(model)
    shared = torch.ones(2, 3)
    cleaned = utils.clean_state_dict_for_safetensors({"a": shared, "b": shared, "c": shared.T, "d": 1})
    assert list(cleaned) == ["a", "c", "d"]
    assert cleaned["c"].is_contiguous()
    assert utils.release_memory(model, shared) == [None, None]
    assert utils.should_reduce_batch_size(torch.OutOfMemoryError("CUDA out of memory"))
    assert not utils.should_reduce_batch_size(RuntimeError("another"))


def test_a_model_is_made_empty_and_filled(accelerate: Any) -> None:
    from accelerate.utils import set_module_tensor_to_device  # type: ignore[reportMissingImports]

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2).requires_grad_(False))

    whole, register = make().double(), nn.Module.register_parameter
    with accelerate.init_empty_weights():
        empty = make()
    assert nn.Module.register_parameter is register
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert {b.device.type for b in empty.buffers()} == {"cpu"}
    with pytest.raises(ValueError, match="no value yet"):
        set_module_tensor_to_device(empty, "0.weight", "cpu")
    with pytest.raises(ValueError, match="shape"):
        set_module_tensor_to_device(empty, "0.weight", "cpu", torch.ones(3, 3))
    with pytest.raises(ValueError, match="no parameter or buffer 'wait'"):
        set_module_tensor_to_device(empty, "0.wait", "cpu", torch.ones(3, 3))
    for name, value in whole.state_dict().items():
        set_module_tensor_to_device(empty, name, "cpu", value)
    assert torch.equal(empty[0].weight, whole[0].weight.float())
    assert [p.requires_grad for p in empty.parameters()] == [True, True, False, False]
    set_module_tensor_to_device(empty, "1.running_mean", "cpu", torch.ones(2), dtype=torch.float64)
    assert empty[1].running_mean.dtype == torch.float64
    with accelerate.init_on_device("meta", include_buffers=True):
        assert {b.device.type for b in make().buffers()} == {"meta"}


def test_a_configuration_file_is_written_once(accelerate: Any, tmp_path: Path) -> None:
    from accelerate.commands.config import load_config_from_file  # type: ignore[reportMissingImports]
    from accelerate.utils import write_basic_config  # type: ignore[reportMissingImports]

    path = tmp_path / "folder" / "config.yaml"
    assert write_basic_config(mixed_precision="bf16", save_location=str(path)) == path
    assert load_config_from_file(str(path)).to_dict() == {"mixed_precision": "bf16"}
    assert write_basic_config(save_location=str(path)) is False
    assert isinstance(accelerate.commands.config.default_config_file, str)


# ---- the lists of prepared objects ---------------------------------------------------------------------------------


def _prepared_five(accelerate: Any, folder: Path) -> tuple[Any, ...]:
    accelerator = accelerate.Accelerator(cpu=True, project_dir=folder, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return accelerator, *accelerator.prepare(model, optimizer, schedule, DataLoader(TensorDataset(LINES)))


def _train(accelerator: Any, model: Any, optimizer: Any, schedule: Any, loader: Any) -> None:
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def test_the_lists_of_prepared_objects_hold_what_states_contain(accelerate: Any, tmp_path: Path) -> None:
    accelerator, model, optimizer, schedule, loader = _prepared_five(accelerate, tmp_path)
    assert list(accelerator._models) == [model]
    assert accelerator._optimizers == [optimizer]
    assert accelerator._schedulers == [schedule]
    assert accelerator._dataloaders == [loader]
    meter = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    accelerator.register_for_checkpointing(meter)
    assert accelerator._custom_objects == [meter]
    accelerator._custom_objects.clear()
    accelerator.free_memory()
    assert not any(map(len, (accelerator._models, accelerator._optimizers, accelerator._schedulers)))


def test_a_program_resumes_without_the_optimizer_and_trains_on(accelerate: Any, tmp_path: Path) -> None:
    first = _prepared_five(accelerate, tmp_path)
    _train(*first)
    first[0].save_state(str(tmp_path / "state"))
    accelerator, model, optimizer, schedule, loader = _prepared_five(accelerate, tmp_path)
    accelerator._optimizers = []
    accelerator._schedulers = []
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(model.weight, first[1].weight)
    assert not optimizer.state
    assert schedule.get_last_lr() == [0.5]
    before = model.weight.detach().clone()
    _train(accelerator, model, optimizer, schedule, loader)
    assert optimizer.state[model.weight]["step"] == 2
    assert schedule.get_last_lr() == [pytest.approx(0.005)]
    assert not torch.equal(model.weight, before)


def test_a_removed_optimizer_is_freed_and_a_removed_model_is_not_saved(accelerate: Any, tmp_path: Path) -> None:
    accelerator, model, optimizer, schedule, _ = _prepared_five(accelerate, tmp_path)
    teacher, frozen = nn.Linear(1, 2), accelerator.prepare_model(nn.Linear(1, 3), evaluation_mode=True)
    teacher = accelerator.prepare(teacher)
    accelerator._models.remove(teacher)
    assert accelerator._models.pop() is frozen
    assert list(accelerator._models) == [model]
    accelerator._models.append(teacher)
    accelerator._models = [one for one in accelerator._models if one is not teacher]
    seen = list[Any]()
    accelerator.register_save_state_pre_hook(lambda models, weights, _: seen.append((list(models), len(weights))))
    accelerator.save_state(str(tmp_path / "state"))
    assert seen == [([model], 1)]
    found = weakref.ref(optimizer)
    accelerator._optimizers.clear()
    accelerator._schedulers.clear()
    del optimizer, schedule
    gc.collect()
    assert found() is None


def test_a_schedule_in_the_list_need_not_be_prepared(accelerate: Any, tmp_path: Path) -> None:
    accelerator, _, optimizer, *_ = _prepared_five(accelerate, tmp_path)
    plain = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    accelerator._schedulers.append(plain)
    plain.step()
    accelerator.save_state(str(tmp_path / "state"))
    plain.step()
    accelerator.load_state(str(tmp_path / "state"))
    assert plain.last_epoch == 1
