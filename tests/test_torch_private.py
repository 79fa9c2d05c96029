"""Each entry of ``torch_private.py`` does what it says with the torch that is installed."""

from __future__ import annotations

import ast
import pickle
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ConstantLR, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline import messages, torch_versions
from paceline import torch_private as private
from paceline.strategies.base import SingleDevice

FILE = Path(private.__file__)
CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[Any]:
    """The default process group, of this process alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def mesh(group: Any) -> Any:
    return dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))


@pytest.fixture
def split(mesh: Any) -> Any:
    """A DTensor of shape (3, 2)."""
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(torch.arange(6.0).view(3, 2), mesh["a"], [Shard(0)])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(1), torch.ones(1)])


def documented() -> dict[str, str]:
    """What the file says of each entry, by name, on one line."""
    lines, found = FILE.read_text().split("\n"), {}
    for node in ast.parse(FILE.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            first = node.lineno - 1
            while lines[first - 1].startswith("#:"):
                first -= 1
            found[ast.unparse(target)] = " ".join(
                line.removeprefix("#:").strip() for line in lines[first:][: node.lineno - 1 - first]
            )
    return {name: " ".join(text.split()) for name, text in found.items()}


def test_every_entry_is_described_and_the_versions_are_those_that_were_tried() -> None:
    entries = documented()
    assert len(entries) > 60
    assert not [name for name, text in entries.items() if not re.search(r"\S\.( |$)", text)]
    oldest = re.search(r'"torch>=([\d.]+)"', (FILE.parent / "pyproject.toml").read_text())
    assert oldest is not None
    newest = ".".join(map(str, torch_versions.NEWEST_TRIED))
    assert f"in torch {oldest[1]} to {newest}." in (private.__doc__ or "")
    for page in ("README.md", "docs/first_fit.md"):
        assert f"PyTorch {oldest[1]} or newer (tested up to {newest})" in (FILE.parent / page).read_text()


def test_every_entry_is_used_below() -> None:
    used = {node.attr for node in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(node, ast.Attribute)}
    assert set(documented()) <= used


# ---- versions --------------------------------------------------------------------------------------------------------


def words(text: str) -> set[str]:
    """The private names in a text that has nothing but names."""
    return {word for word in re.split(r"\W", text) if re.fullmatch(r"_{1,2}[A-Za-z]\w*(?<!__)", word)}


#: Attributes in the file that are public in torch or in Python, and two that are used only if torch has them.
PUBLIC = {
    *("DTensor", "Logger", "Module", "Parameter", "SyncBatchNorm", "device", "dtype", "forward", "get", "getLogger"),
    *("Variable", "autograd", "grad", "name", "options", "parameters", "patch", "placements", "pop", "queue_callback"),
    *("requires_grad", "requires_grad_", "shape", "to", "values"),
    *("manual_backward_finalization_active", "unsharded_accumulated_grad"),
}


def test_every_private_name_is_in_the_table_and_the_installed_torch_has_it() -> None:
    found: set[str] = set()
    unmarked: set[str] = set()  # private by where they are, without an underscore of their own
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.Attribute):
            found |= words(node.attr)
            unmarked |= set() if node.attr.startswith("_") else {node.attr}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            found |= words(node.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= words(" ".join([getattr(node, "module", None) or "", *(alias.name for alias in node.names)]))
    assert len(found) > 60
    table = {*re.split(r"\W", " ".join([*torch_versions.USED, *torch_versions.USED.values()]))}
    assert unmarked - table <= PUBLIC
    assert not found - {"__recompiles"} - words(" ".join([*torch_versions.USED, *torch_versions.USED.values()]))
    assert torch_versions.missing_names() == []
    assert torch_versions.untried() is None
    assert torch_versions.lacks("nn.modules.module", "_gone")


def test_a_torch_that_was_not_tried_is_warned_about_once_with_the_names_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def run() -> list[str]:
        SingleDevice(CPU).setup_environment()
        return [str(recwarn.pop().message) for _ in range(len(recwarn))]

    assert run() == []
    monkeypatch.setattr(torch_versions, "NEWEST_TRIED", (2, 3))
    messages.set_rank(1)
    assert run() == []
    messages.set_rank(0)
    messages.forget()
    (text,) = run()
    assert text.startswith(f"Paceline was tested up to torch 2.3, but torch {torch.__version__} is installed. ")
    assert run() == []
    messages.forget()
    table = {"nn.modules.module": "_buffers|_gone _left", "nn.gone": "_apply", "Tensor": "_gone|_left _version"}
    monkeypatch.setattr(torch_versions, "USED", table)
    (text,) = run()
    assert "torch.nn.modules.module._left, torch.nn.gone._apply, torch.Tensor._gone|_left. " in text


def import_without(owner: Any, name: str) -> str:
    """What the first import of a public name says with a newer torch that lacks one of the private names."""
    for module in [one for one in sys.modules if one.partition(".")[0] == "paceline"]:
        del sys.modules[module]
    torch.__version__ = "2.99.0"
    delattr(owner, name)
    with pytest.raises(ImportError) as caught:
        exec("from paceline import Trainer", {})
    assert isinstance(caught.value.__cause__, AttributeError | ImportError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch, "_foreach_mul_"), (torch.overrides, "_get_current_function_mode"), (nn.modules.conv, "_ConvNd")],
)
def test_an_import_that_fails_for_want_of_a_private_name_says_which_torch_was_tested(owner: Any, name: str) -> None:
    (text,) = ranks(1, import_without, owner, name)
    assert text.startswith("paceline.Trainer cannot be imported: module 'torch")
    assert f"has no attribute '{name}'. Paceline was tested up to torch " in text
    assert "but torch 2.99.0 is installed." in text
    assert ("private names, which Paceline uses: torch._foreach_mul_. " in text) is (owner is torch)


# ---- data loading ----------------------------------------------------------------------------------------------------


def test_a_loader_with_persistent_workers_keeps_its_iterator_until_it_is_forgotten() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), num_workers=1, persistent_workers=True)
    assert private.running_iterator(loader) is None
    iterator = iter(loader)
    assert private.running_iterator(loader) is iterator
    (worker,) = private.workers_of(iterator)
    private.shut_down_workers(iterator)
    assert worker.is_alive()
    private.shut_down_workers(iterator, persistent=True)
    worker.join()
    assert not worker.is_alive()
    private.forget_iterator(loader)
    assert private.running_iterator(loader) is None


def test_what_has_no_workers_has_none_to_shut_down() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)))
    for iterator in (iter(loader), iter([1])):
        assert private.workers_of(iterator) == []
        private.shut_down_workers(iterator, persistent=True)


def test_a_loader_whose_class_makes_iterators_itself_is_told_apart() -> None:
    class Own(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return super()._get_iterator()

    data = TensorDataset(torch.arange(4))
    assert private.makes_torchs_iterators(DataLoader(data))
    assert not private.makes_torchs_iterators(Own(data))


def test_an_iterator_has_its_sampler_and_says_whether_it_pins() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    iterator = iter(loader)
    assert private.index_sampler(iterator) is loader.batch_sampler
    assert private.pins_memory(iterator) is False


def test_an_iterator_reads_the_iterator_of_its_data_set() -> None:
    found = private.dataset_iterator(iter(DataLoader(Stream())))
    assert type(found) is type(iter([]))
    plain = iter([1])
    assert private.dataset_iterator(plain) is plain


# ---- modules ---------------------------------------------------------------------------------------------------------


def test_what_a_module_holds_itself_can_be_replaced() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2))
    (norm,) = net
    assert private.own_modules(net) == {"0": norm}
    private.own_parameters(norm)["weight"] = weight = nn.Parameter(torch.zeros(2))
    assert norm.weight is weight
    private.own_buffers(norm)["running_mean"] = mean = torch.ones(2)
    assert norm.running_mean is mean


def test_buffers_that_are_not_saved_are_known() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("other", torch.zeros(1), persistent=False)
    assert private.unsaved_buffers(module) == {"other"}


def test_a_module_whose_init_has_not_run_is_told_apart() -> None:
    assert private.is_initialized(nn.Module())
    assert not private.is_initialized(nn.Module.__new__(nn.Module))


def test_an_attribute_takes_the_place_of_what_moves_a_module() -> None:
    module = nn.Linear(1, 1)
    getattr(module, private.APPLY)(lambda tensor: tensor.double())
    assert module.weight.dtype is torch.float64
    vars(module)[private.APPLY] = lambda function: "kept"
    assert module.float() == "kept"
    assert module.weight.dtype is torch.float64


def test_a_call_goes_to_what_the_module_was_compiled_to() -> None:
    module, x = nn.Linear(2, 1), torch.ones(2)
    assert not private.is_compiled(module)
    setattr(module, private.COMPILED_CALL, lambda x: "compiled")
    assert private.is_compiled(module)
    assert module(x) == "compiled"
    assert torch.equal(private.plain_call(module)(x), module.forward(x))


def test_a_module_loads_what_it_holds_itself() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2))
    saved = net.state_dict()
    version = private.saved_versions(saved)["0"]
    assert version == {"version": 2}
    assert private.saved_versions({}) == {}
    missing: list[str] = []
    unexpected: list[str] = []
    problems: list[str] = []
    given = {"0.weight": torch.full((2,), 3.0), "0.bias": torch.zeros(5), "0.more": torch.zeros(1)}
    private.load_own_tensors(net[0], given, "0.", version, missing, unexpected, problems)
    assert net[0].weight.tolist() == [3, 3]
    assert missing == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    assert unexpected == ["0.more"]
    assert len(problems) == 1


def test_loading_returns_this_class() -> None:
    module = nn.Linear(1, 1)
    assert type(module.load_state_dict(module.state_dict())) is private.IncompatibleKeys


def test_layers_are_found_by_their_common_class() -> None:
    assert all(isinstance(one(2), private.BatchNorm) for one in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert all(isinstance(one(2, 2, 1), private.Convolution) for one in (nn.Conv1d, nn.ConvTranspose2d))
    assert all(isinstance(one(), private.Dropout) for one in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))


def test_a_batch_norm_can_run_as_a_synchronized_one() -> None:
    alone, layer = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    vars(layer).update(private.as_sync_batch_norm(layer))
    x = torch.arange(12.0).view(4, 3)
    assert torch.equal(layer(x), alone(x))
    assert torch.equal(layer.running_var, alone.running_var)
    with pytest.raises(ValueError, match="channels should be non-zero"):
        layer(torch.empty(4, 0))


# ---- tensors and operators -------------------------------------------------------------------------------------------


def test_trees_are_taken_apart_and_put_together() -> None:
    tree = {"a": [torch.ones(1), 2]}
    leaves, form = private.pytree.tree_flatten(tree)
    assert leaves == private.pytree.tree_leaves(tree)
    assert private.pytree.tree_unflatten(leaves, form) == tree
    assert private.pytree.tree_map_only(int, str, tree)["a"][1] == "2"
    assert private.pytree.tree_map(lambda leaf: 0, tree) == {"a": [0, 0]}


def test_tensors_of_one_storage_have_one_key() -> None:
    for x in (torch.ones(3), torch.ones(3, device="meta")):
        key = private.storage_key(x.untyped_storage())
        assert private.storage_key(x[1:].untyped_storage()) == key
        assert private.storage_key(x.clone().untyped_storage()) != key


def test_a_tensor_knows_its_hooks_of_backward() -> None:
    x = torch.ones(1, requires_grad=True)
    assert private.backward_hooks(x) is None
    assert not private.has_hooks(x)
    x.register_hook(lambda grad: None)
    assert len(private.backward_hooks(x)) == 1
    assert private.has_hooks(x)
    y = torch.ones(1, requires_grad=True)
    y.register_post_accumulate_grad_hook(lambda tensor: None)
    assert private.has_hooks(y)


def test_changes_in_place_are_counted() -> None:
    x = torch.ones(1)
    before = private.change_count(x)
    x.add_(1)
    assert private.change_count(x) == before + 1
    with torch.inference_mode():
        assert private.change_count(torch.ones(1)) is None


def test_several_tensors_are_multiplied_and_measured_at_once() -> None:
    tensors = [torch.full((4,), 1.0), torch.full((1,), 3.0)]
    private.multiply_each_(tensors, 2.0)
    private.multiply_each_(tensors, torch.tensor(0.5))
    private.multiply_each_(tensors, 2.0)
    norms = private.norm_of_each(tensors, 2.0, dtype=torch.float64)
    assert [(norm.item(), norm.dtype) for norm in norms] == [(4.0, torch.float64), (6.0, torch.float64)]


@pytest.mark.parametrize(("last", "found"), [(4.0, 0.0), (torch.inf, 1.0)])
def test_gradients_are_unscaled_and_overflows_noted(last: float, found: float) -> None:
    grads, overflow = [torch.tensor([2.0]), torch.tensor([last])], torch.zeros(1)
    private.unscale_each_(grads, overflow, torch.tensor([0.5]))
    assert grads[0].item() == 1
    assert overflow.item() == found


def test_a_mode_sees_the_operators_that_are_named() -> None:
    class Seen(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    x = torch.ones(2)
    with Seen():
        x.sum().item()
        x.unique()
    assert private.read_number in seen
    assert private.find_unique in seen


def test_the_product_of_groups_of_matrices_is_an_operator_with_one_form() -> None:
    schema = private.grouped_mm.default._schema
    assert [argument.name for argument in schema.arguments] == ["self", "mat2", "offs", "bias", "out_dtype"]


def test_the_innermost_function_mode_is_known() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        """Does nothing."""

    assert private.current_function_mode() is None
    with Mode(), Mode() as inner:
        assert private.current_function_mode() is inner


def test_fake_tensors_have_shapes_and_no_values() -> None:
    with private.FakeTensorMode():
        x = torch.ones(2) @ torch.ones(2, 3)
        assert isinstance(x, private.FakeTensor)
        assert x.shape == (3,)
        with pytest.raises(private.DataDependentOutputException):
            x.sum().item()


def gradient() -> float:
    x = torch.ones(1, requires_grad=True)
    (3 * x).sum().backward()
    assert x.grad is not None
    return x.grad.item()


def test_a_fork_computes_gradients_after_fake_tensors_were_made() -> None:
    with private.FakeTensorMode():
        torch.ones(1)
    assert gradient() == 3
    assert ranks(1, gradient) == [3]


# ---- process groups --------------------------------------------------------------------------------------------------


def test_the_default_group_has_a_store_and_a_timeout(group: Any) -> None:
    private.default_store().set("key", "value")
    assert private.default_store().get("key") == b"value"
    assert private.timeout_of(group, CPU) == timedelta(seconds=77)


def test_a_group_that_sends_nothing_has_more_ranks_than_there_are_processes() -> None:
    dist.init_process_group("fake", store=private.fake_store(), rank=0, world_size=8)
    try:
        dist.all_reduce(torch.ones(1))
        assert dist.get_world_size() == 8
    finally:
        dist.destroy_process_group()


def test_data_parallel_times_its_communication(group: Any) -> None:
    wrapped = DistributedDataParallel(nn.Linear(2, 1))
    private.time_every_step(wrapped)
    for _ in range(2):
        wrapped(torch.ones(2)).sum().backward()
    told = private.communication_times(wrapped)
    assert told["iteration"] >= 1
    assert told["avg_backward_comm_time"] > 0
    assert "avg_backward_compute_comm_overlap_time" in told


def test_data_parallel_orders_its_buckets_by_the_first_backward(group: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    wrapped = DistributedDataParallel(net)
    assert private.bucket_order(wrapped) is None
    wrapped(torch.ones(2)).sum().backward()
    private.settle_buckets(wrapped)
    order = private.bucket_order(wrapped)
    assert order is not None
    assert {id(one) for one in order[:2]} == {id(one) for one in net[1].parameters()}
    assert {id(one) for one in order} == {id(one) for one in net.parameters()}


def test_data_parallel_ignores_what_an_inner_module_says(group: Any) -> None:
    wrapper = nn.Sequential(nn.Linear(2, 1))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(wrapper[0], ["bias"])
    assert private.ignored_by_ddp(wrapper[0]) == {"bias"}
    private.ignore_in_ddp(wrapper, ["0.bias"])
    assert DistributedDataParallel(wrapper).parameters_to_ignore == {"0.bias"}


def test_a_mesh_is_flattened(mesh: Any) -> None:
    flat = private.flatten_mesh(mesh["a", "b"], "both")
    assert (flat.mesh_dim_names, flat.size()) == (("both",), 1)


# ---- DTensor and FSDP ------------------------------------------------------------------------------------------------


def test_a_dtensor_is_known_by_its_part(split: Any) -> None:
    whole = torch.ones(2)
    assert private.is_in_parts(split)
    assert not private.is_in_parts(whole)
    assert private.local_part(split).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert type(private.local_part(split)) is Tensor
    assert private.local_part(whole) is whole


def test_a_dtensor_is_made_around_another_part(split: Any) -> None:
    made = private.with_local_part(split, torch.zeros(3, 2))
    assert type(made) is type(split)
    assert (made.shape, made.placements, made.device_mesh) == (split.shape, split.placements, split.device_mesh)
    assert made.to_local().sum() == 0


def test_the_layout_of_a_part_is_computed(split: Any) -> None:
    shape, offset = private.local_shape_and_offset(split)
    assert (tuple(shape), tuple(offset)) == ((3, 2), (0, 0))


def test_layouts_of_results_are_forgotten(split: Any) -> None:
    cached = type(split)._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_info
    redistribute: Any = import_module(private.REDISTRIBUTES)
    redistribute.get_redistribute_planner(split.device_mesh, split._spec.tensor_meta)
    costs = import_module("torch.distributed.tensor._collective_utils").MeshTopoInfo.build_from_mesh
    costs(split.device_mesh)
    (split + split).sum()
    private.forget_layouts()
    assert cached().currsize == 0
    assert not redistribute._planner_cache
    assert costs.cache_info().currsize == 0  # each would keep the mesh alive, and so the group's connections
    assert (split + split).sum().full_tensor() == 30


def test_the_logger_of_redistributions_has_this_name() -> None:
    assert import_module(private.REDISTRIBUTES).logger.name == private.REDISTRIBUTES


def test_fsdp_ends_a_backward_for_what_waits_and_knows_its_parameters(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    before = set(vars(net[0]))
    fully_shard(net[0], mesh=mesh["a"])
    added = set(vars(net[0])) - before
    assert private.FSDP_MARK in added
    assert all(name.startswith(private.FSDP_ATTRIBUTES) for name in added)
    fully_shard(net, mesh=mesh["a"])
    kept = private.fsdp_parameters(net)
    assert {id(one.sharded_param) for one in kept} == set(map(id, net.parameters()))
    assert private.waiting_gradient(kept[0]) is None

    state = private.fsdp_state(net)
    net.set_requires_gradient_sync(False)
    held: list[Any] = []

    def hide(module: Any, args: Any, output: Tensor) -> Any:
        held.append(output)  # where torch does not look for it
        return

    net.register_forward_hook(hide)
    net(torch.ones(1, 2))
    loss = held[0].sum()
    private.expect_backward(state)(loss)
    ended: list[bool] = []
    private.after_backward(net, lambda: ended.append(True))
    loss.backward()
    assert ended == [True]
    waiting = private.waiting_gradient(kept[0])
    assert waiting is not None
    private.set_waiting_gradient(kept[0], torch.full_like(waiting, 7))
    assert all(parameter.grad is None for parameter in net.parameters())
    net.set_requires_gradient_sync(True)
    private.finish_backward(state)
    assert ended == [True, True]
    private.after_backward(net, None)
    private.finish_backward(state)
    assert ended == [True, True]
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert private.local_part(kept[0].sharded_param.grad).unique().tolist() == [7]
    assert all(private.waiting_gradient(one) is None for one in kept)

    net(torch.ones(1, 2))
    gathered = list(net.parameters())
    found = [private.gathered_parameter(one) for one in kept]
    lent = [id(parameter) for parameter, is_gathered in found if is_gathered]
    assert lent
    assert set(lent) <= set(map(id, gathered))
    assert [private.change_count(parameter) for parameter in gathered] == [0] * len(gathered)
    gathered[0].requires_grad_(False)
    private.keep_requires_grad(kept)
    net.reshard()
    assert [parameter.requires_grad for parameter in net.parameters()] == [False, *[True] * (len(gathered) - 1)]
    assert not any(private.gathered_parameter(one)[1] for one in kept)
    assert private.placement_of(kept[0]).dim == 0
    shard: Tensor = kept[0].sharded_param
    before, local = private.storage_id(shard), private.local_part(shard)
    shard.data = shard.data * 2
    assert private.storage_id(shard) != before
    assert private.local_part(shard) is local


def test_a_function_is_called_once_a_backward_pass_has_all_gradients() -> None:
    first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
    seen: list[Any] = []

    def hook(parameter: Tensor) -> None:
        private.at_end_of_backward(lambda: seen.append((first.grad, second.grad)))

    first.register_post_accumulate_grad_hook(hook)
    second.register_post_accumulate_grad_hook(hook)
    (2 * first + 3 * second).backward()
    assert seen == [(torch.tensor([2.0]), torch.tensor([3.0]))] * 2


def test_policies_of_fsdp_say_what_they_wrap() -> None:
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

    def decide(module: nn.Module) -> bool:
        return True

    assert private.classes_of_policy(ModuleWrapPolicy({nn.Linear})) == (nn.Linear,)
    assert private.function_of_policy(CustomPolicy(decide)) is decide
    assert private.classes_of_policy(decide) is None
    assert private.function_of_policy(decide) is None


# ---- compiling -------------------------------------------------------------------------------------------------------


def test_a_compiled_module_has_its_compiler_and_what_is_inside() -> None:
    inner = nn.Linear(2, 1)
    model = torch.compile(inner, backend="eager")
    assert private.compiler_is_loaded()
    assert private.inside_compiled(model) is inner
    assert callable(private.compiler_of(model))
    assert private.compiler_of(inner) is None


def test_compilations_are_told_and_recompilations_explained(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def begin(*_: Any) -> None:
        told.append("begin")

    def end(*_: Any) -> None:
        told.append("end")

    def double(x: Tensor) -> Tensor:
        return x * 2

    logger = private.recompilations()
    before = logger.level, logger.propagate
    logger.setLevel("DEBUG")
    logger.addHandler(caplog.handler)
    private.on_compiling(begin, end)
    private.on_compiling(begin, end)
    try:
        compiled = torch.compile(double, backend="eager")
        compiled(torch.ones(2))
        assert told == ["begin", "end"]
        compiled(torch.ones(2, dtype=torch.float64))
        assert "Recompiling function double" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)
        logger.level, logger.propagate = before
        private.off_compiling(begin, end)
    compiled(torch.ones(2, dtype=torch.int32))
    assert told == ["begin", "end"] * 2


def test_backward_is_compiled_as_part_of_a_function() -> None:
    weight = torch.ones(2, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad((weight * x).sum(), weight)
        return grad

    with private.tracing_whole_steps():
        assert torch.compile(step, backend="eager", fullgraph=True)(torch.full((2,), 3.0)).tolist() == [3, 3]


def test_a_function_that_cannot_be_compiled_raises_this() -> None:
    failed, too_often = private.compiler_errors()
    assert issubclass(too_often, Exception)

    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(failed):
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(1))


def test_the_compiler_is_promised_that_a_tensor_stays() -> None:
    x = torch.ones(1)
    private.keep_address(x)
    assert x._dynamo_static_input_type


def test_the_collecting_of_gradients_is_traced_as_other_code() -> None:
    methods: dict[str, Any] = {"_init_group": torch.optim.Adam._init_group}
    private.let_trace_groups(methods)
    assert methods["_init_group"].__name__ == "_init_group"
    assert not hasattr(methods["_init_group"], "_torchdynamo_orig_callable")  # torch 2.15's never has it
    none: dict[str, Any] = {}
    private.let_trace_groups(none)
    assert not none


# ---- optimizers, schedulers, loss scaling ----------------------------------------------------------------------------


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)


def test_a_scheduler_warns_unless_its_optimizer_has_stepped(recwarn: pytest.WarningsRecorder) -> None:
    schedulers = [StepLR(optimizer(), 1) for _ in range(2)]
    setattr(schedulers[0].optimizer, private.HAS_STEPPED, True)
    schedulers[0].step()
    assert not recwarn
    schedulers[1].step()
    assert "optimizer.step()" in str(recwarn[0].message)


def test_hooks_of_a_step_are_known() -> None:
    one = optimizer()
    assert private.takes_step_hooks(one)
    assert not private.takes_step_hooks(torch.optim.SGD.__new__(torch.optim.SGD))
    assert private.step_hooks(one) == []
    one.register_step_pre_hook(print)
    one.register_step_post_hook(repr)
    assert private.step_hooks(one) == [print, repr]


def test_a_step_that_a_scheduler_has_put_there_is_told_apart() -> None:
    one = optimizer()
    assert not private.is_of_scheduler(one.step)
    StepLR(one, 1)
    assert private.is_of_scheduler(vars(one)["step"])


def test_an_optimizer_that_unscales_in_its_step_is_told_apart() -> None:
    weights = [nn.Parameter(torch.ones(1))]
    assert private.unscales_in_its_step(torch.optim.Adam(weights, fused=True))
    assert not private.unscales_in_its_step(torch.optim.Adam(weights))


def test_schedulers_have_others_inside_and_their_last_rates() -> None:
    one = optimizer()
    inner = [ConstantLR(one, 0.5) for _ in range(2)]
    for outer in (
        torch.optim.lr_scheduler.SequentialLR(one, inner, [1]),
        torch.optim.lr_scheduler.ChainedScheduler(inner),
    ):
        assert list(getattr(outer, private.INNER_SCHEDULERS)) == inner
        getattr(outer, private.LAST_RATES).append(7.0)
        assert outer.get_last_lr()[-1] == 7


def test_a_scaler_has_its_scale_and_a_state_for_each_optimizer() -> None:
    one, scaler = optimizer(), torch.amp.GradScaler("cpu", init_scale=8.0)
    parameter = one.param_groups[0]["params"][0]
    scaler.scale(parameter.sum()).backward()
    assert private.scale_of(scaler).item() == 8
    scaler.unscale_(one)
    state = private.scaler_states(scaler)[id(one)]
    assert state["stage"] is torch.amp.grad_scaler.OptState.UNSCALED
    assert [found.item() for found in state["found_inf_per_device"].values()] == [0]
    scaler.update()
    assert not private.scaler_states(scaler)

    def overflow(optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        return {CPU: torch.ones(1)}

    private.unscale_with(scaler, overflow)
    scaler.step(one)
    assert parameter.item() == 1


# ---- files -----------------------------------------------------------------------------------------------------------


def test_an_index_of_a_checkpoint_names_these(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as checkpoint

    checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    names: set[tuple[str, str]] = set()

    class Names(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            names.add((module, name))
            return super().find_class(module, name)

    with (tmp_path / ".metadata").open("rb") as file:
        Names(file).load()
    found = {(module, name) for module, name in names if module != "torch.distributed.checkpoint.metadata"}
    assert {one for one in found if one[1].startswith("_")} <= private.NAMES_IN_INDEX
    assert all(hasattr(import_module(module), name) for module, name in private.NAMES_IN_INDEX)


class Named(Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [torch.ones(1), torch.nn.Parameter(torch.ones(1)), torch.eye(2).to_sparse(), torch.ones(1).as_subclass(Named)],
)
def test_tensors_are_rebuilt_by_names_that_begin_like_this(value: Tensor) -> None:
    rebuild = value.__reduce_ex__(2)[0]
    assert f"{rebuild.__module__}.{rebuild.__name__}".startswith(private.REBUILD_TENSORS)


def test_a_summary_writer_makes_a_new_file_writer_after_it_was_closed(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    first = private.event_writer(writer)
    assert first is private.event_writer(writer)
    writer.close()
    assert private.event_writer(writer) is not first
    writer.close()
