"""Callbacks that freeze layers at first and train them later."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .. import messages
from ..torch_private import INNER_SCHEDULERS, LAST_RATES, BatchNorm, own_modules
from .base import Callback
from .weight_averaging import checked_count

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

    Modules = nn.Module | Iterable["Modules"]


class BaseFinetuning(Callback):
    """Freeze layers before the optimizers are created; unfreeze them and add them to an optimizer at a chosen epoch.

    Subclass this class and define :meth:`freeze_before_training` and :meth:`finetune_function`. In
    ``configure_optimizers``, pass only the trainable parameters: ``[p for p in self.parameters() if p.requires_grad]``.

    A checkpoint records by name which parameters were added and which are frozen. A resumed run has the same parameter
    groups, and ``finetune_function`` still runs once per epoch. Schedulers also change the learning rate of a new
    group, in proportion to that of the first group.

    Example:
        >>> class UnfreezeEncoder(BaseFinetuning):
        ...     def freeze_before_training(self, pl_module):
        ...         self.freeze(pl_module.encoder)
        ...
        ...     def finetune_function(self, pl_module, epoch, optimizer):
        ...         if epoch == 5:
        ...             self.unfreeze_and_add_param_group(pl_module.encoder, optimizer, lr=1e-4)
    """

    runs_in_trials = True

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._restored: dict[str, Any] = {}
        self._added: list[list[list[str]]] = []
        self._trainable: list[str] = []
        self._tracking: list[str] = []
        self._latest_epoch = -1

    def freeze_before_training(self, pl_module: TrainingModule) -> None:
        """Freeze the layers that do not train at first. Called in ``setup``, before the optimizers are created."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define freeze_before_training(pl_module), which freezes layers before "
            "training. Define it, for example with self.freeze(pl_module.backbone)."
        )

    def finetune_function(self, pl_module: TrainingModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the layers that train from ``epoch`` (0-based) on. Called once per epoch and optimizer."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define finetune_function(pl_module, epoch, optimizer), which unfreezes "
            "layers at a given epoch. Define it, for example with self.unfreeze_and_add_param_group(...)."
        )

    # ---- helpers -----------------------------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the layers in ``modules`` that are leaves or have their own parameters, without duplicates."""
        if isinstance(modules, nn.Module):
            found = list(modules.modules())
        elif isinstance(modules, Iterable) and not isinstance(modules, (str, Tensor)):
            found = [layer for module in modules for layer in BaseFinetuning.flatten_modules(module)]
        else:
            raise TypeError(
                f"Expected a module or an iterable of modules, got {modules!r:.60} of type {type(modules).__name__}. "
                "Pass layers such as pl_module.backbone or [pl_module.stem, pl_module.blocks]."
            )
        unique = {id(module): module for module in found}.values()
        return [m for m in unique if not own_modules(m) or any(True for _ in m.parameters(recurse=False))]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[Parameter]:
        """Yield the trainable parameters in ``modules`` or, with ``requires_grad=False``, the frozen ones.

        Each parameter appears once. With ``train_bn=False``, the parameters of BatchNorm layers are left out.
        """
        seen: set[int] = set()
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, BatchNorm) and not train_bn:
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad == requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Make all parameters in ``modules`` trainable and let BatchNorm layers update their running statistics."""
        for module in BaseFinetuning.flatten_modules(modules):
            _make_layer_trainable(module)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze a layer's own parameters, and its running statistics if it is a BatchNorm layer."""
        if isinstance(module, BatchNorm):
            module.track_running_stats = False
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters in ``modules``. With ``train_bn``, BatchNorm layers stay trainable."""
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, BatchNorm) and train_bn:
                _make_layer_trainable(module)
            else:
                BaseFinetuning.freeze_module(module)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Parameter]) -> list[Parameter]:
        """Return the parameters that ``optimizer`` does not contain yet; warn about the others."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        params = list(params)
        new = [p for p in params if id(p) not in held]
        if len(new) < len(params):
            messages.warn(
                f"The optimizer already contains {len(params) - len(new)} of the {len(params)} parameters to "
                "unfreeze. These parameters stay in their groups. Pass the optimizer only the parameters that are "
                "trainable from the start: [p for p in self.parameters() if p.requires_grad]."
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze ``modules`` and add their parameters to ``optimizer`` as a new group.

        Args:
            modules: a module or a nested iterable of modules.
            optimizer: the optimizer. Frozen parameters that it already contains cause a warning and are not added
                again.
            lr: the new group's learning rate; None means the first group's rate divided by ``initial_denom_lr``.
            initial_denom_lr: see ``lr``.
            train_bn: unfreeze BatchNorm layers too; if False, leave them unchanged.
        """
        trained = {id(p) for p in BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)}
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, BatchNorm):
                _make_layer_trainable(module)
        trained &= {id(p) for group in optimizer.param_groups for p in group["params"]}
        params = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        params = BaseFinetuning.filter_on_optimizer(optimizer, (p for p in params if id(p) not in trained))
        if params:
            rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else float(lr)
            for parameter in params:
                parameter.grad = None  # stale, because no optimizer has cleared it
            optimizer.add_param_group({"params": params, "lr": rate})

    # ---- the run -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        if stage == "fit":
            self._forget()
            self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._added = [[] for _ in trainer.optimizers]
        if self._restored:
            self._restore(trainer, pl_module, self._restored)
            self._restored = {}

    def _restore(self, trainer: Trainer, pl_module: TrainingModule, state: dict[str, Any]) -> None:
        """Restore frozen layers and parameter groups. The optimizers' own state is loaded afterward."""
        parameters = dict(pl_module.named_parameters())
        added = state["added"]
        self._check_restored(type(pl_module).__name__, len(trainer.optimizers), parameters, added)
        trainable, tracking = set(state["trainable"]), set(state["tracking"])
        for name, parameter in parameters.items():
            parameter.requires_grad = name in trainable
        for name, module in pl_module.named_modules():
            if isinstance(module, BatchNorm):
                module.track_running_stats = name in tracking
        for optimizer, groups in zip(trainer.optimizers, added, strict=True):
            before = len(optimizer.param_groups)
            for names in groups:
                optimizer.add_param_group({"params": [parameters[name] for name in names]})
            _extend_schedulers(trainer, optimizer, before)
        self._added, self._trainable, self._tracking = added, state["trainable"], state["tracking"]
        self._latest_epoch = state["latest_epoch"]

    def _check_restored(self, module: str, optimizers: int, parameters: Any, added: list[list[list[str]]]) -> None:
        if len(added) != optimizers:
            raise RuntimeError(
                f"The checkpoint's {type(self).__name__} was saved when the number of optimizers was {len(added)}, but "
                f"{module}.configure_optimizers returned {optimizers}. Resume with the module that the checkpoint was "
                "saved from."
            )
        missing = [name for groups in added for names in groups for name in names if name not in parameters]
        if missing:
            raise RuntimeError(
                f"The checkpoint's {type(self).__name__} added parameters that {module} does not have ({len(missing)} "
                f"in total, such as {messages.names(missing[:3], 'and')}). Resume with the module that the checkpoint "
                "was saved from."
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        epoch = trainer.current_epoch
        if epoch <= self._latest_epoch:
            return
        self._latest_epoch = epoch
        for index, optimizer in enumerate(trainer.optimizers):
            before = len(optimizer.param_groups)
            self.finetune_function(pl_module, epoch, optimizer)
            _extend_schedulers(trainer, optimizer, before)
            self._added[index] += self._names(pl_module, optimizer.param_groups[before:])
        self._trainable = [name for name, p in pl_module.named_parameters() if p.requires_grad]
        self._tracking = [
            name for name, m in pl_module.named_modules() if isinstance(m, BatchNorm) and m.track_running_stats
        ]

    def _names(self, pl_module: TrainingModule, groups: list[dict[str, Any]]) -> list[list[str]]:
        if not groups:
            return []
        names = {id(p): name for name, p in pl_module.named_parameters()}
        unknown = [tuple(p.shape) for group in groups for p in group["params"] if id(p) not in names]
        if unknown:
            raise ValueError(
                f"{type(self).__name__}.finetune_function added a parameter of shape {unknown[0]} that does not belong "
                f"to {type(pl_module).__name__}, so a resumed run could not find the parameter. Assign the layer "
                "that contains it to an attribute of the module."
            )
        return [[names[id(p)] for p in group["params"]] for group in groups]

    def state_dict(self) -> dict[str, Any]:
        return self._restored or {
            "added": self._added,
            "trainable": self._trainable,
            "tracking": self._tracking,
            "latest_epoch": self._latest_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict if state_dict["latest_epoch"] >= 0 else {}


def _make_layer_trainable(layer: nn.Module) -> None:
    if isinstance(layer, BatchNorm):
        layer.track_running_stats = layer.running_mean is not None
    for parameter in layer.parameters(recurse=False):
        parameter.requires_grad = True


def _extend_schedulers(trainer: Trainer, optimizer: Optimizer, before: int) -> None:
    """Add the parameter groups from index ``before`` onward to the schedulers of ``optimizer``."""
    for config in trainer.lr_scheduler_configs:
        if getattr(config.scheduler, "optimizer", None) is optimizer:
            for index in range(before, len(optimizer.param_groups)):
                _extend_scheduler(config.scheduler, index)


#: Values that a scheduler keeps for each group, in its attributes and in the group itself.
_LISTS = ("base_lrs", LAST_RATES, "max_lrs", "min_lrs", "lr_lambdas", "base_momentums", "max_momentums")
_GROUP_KEYS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")


def _extend_scheduler(scheduler: Any, index: int) -> None:
    """Make a scheduler treat group ``index`` like the first group, with a proportional learning rate."""
    for child in getattr(scheduler, INNER_SCHEDULERS, ()):
        _extend_scheduler(child, index)
    first, group = scheduler.optimizer.param_groups[0], scheduler.optimizer.param_groups[index]
    ratio = group["lr"] / first["lr"] if first["lr"] else 1.0
    for name in _LISTS:
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and len(values) == index:
            values.append(values[0] * ratio if name.endswith(("lrs", "_lr")) else values[0])
    for key in _GROUP_KEYS:
        if key in first and key not in group:
            group[key] = first[key] * ratio if key.endswith("_lr") else first[key]


def double(epoch: int) -> float:
    """The default ``lambda_func``, which doubles the learning rate each epoch."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Train a module's ``backbone`` from a given epoch on, with a learning rate that grows to match the other layers'.

    The module needs a ``backbone`` attribute (an ``nn.Module`` created in ``__init__``) and optimizers for the
    parameters that are trainable from the start. The backbone is added to the first optimizer.

    Args:
        unfreeze_backbone_at_epoch: the first epoch (0-based) in which the backbone trains.
        lambda_func: ``lambda_func(epoch)`` returns the factor by which the backbone's learning rate is multiplied at
            the start of each later epoch. This ``epoch`` is counted from 1.
        backbone_initial_ratio_lr: the backbone's initial learning rate as a fraction of the first group's.
        backbone_initial_lr: the backbone's initial learning rate.
        should_align: once the backbone's learning rate reaches the first group's, keep the two equal.
        initial_denom_lr: the same as ``backbone_initial_ratio_lr=1 / initial_denom_lr``. Pass at most one of the three
            learning rate arguments.
        train_bn: train the backbone's BatchNorm layers from the start, while its other layers are frozen. If False,
            the BatchNorm layers stay frozen throughout.
        verbose: report the learning rates at the start of each epoch.
        rounding: number of decimals in the reported learning rates.

    Raises:
        TypeError: for an argument of the wrong type, or a module without ``backbone``.
        ValueError: for an argument out of range, contradictory learning rates, or a module without optimizers.
    """

    #: Whether the backbone is added to every optimizer, instead of only to the first.
    _every_optimizer = False

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = double,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        checked_count(name, "unfreeze_backbone_at_epoch", unfreeze_backbone_at_epoch, 0)
        checked_count(name, "rounding", rounding, 0)
        if not callable(lambda_func):
            raise TypeError(
                f"{name}: lambda_func={lambda_func!r} is not callable. Pass a function that takes the epoch and "
                "returns the factor for the backbone's learning rate, such as lambda epoch: 1.5."
            )
        _check_rates(name, backbone_initial_ratio_lr, backbone_initial_lr, initial_denom_lr)
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        backbone = getattr(pl_module, "backbone", None)
        if stage == "fit" and not isinstance(backbone, nn.Module):
            raise TypeError(
                f"{type(self).__name__} needs {type(pl_module).__name__}.backbone to be an nn.Module when the fit "
                f"begins, but found {backbone!r}. Create the backbone in __init__, or subclass BaseFinetuning for "
                "other layers."
            )
        super().setup(trainer, pl_module, stage)

    def _forget(self) -> None:
        super()._forget()
        self.previous_backbone_lr: float | None = None
        self._optimizers: list[Optimizer] = []
        self._groups: dict[int, int | None] = {}  # by optimizer, the index of the backbone's group

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not trainer.optimizers:
            raise ValueError(
                f"{type(self).__name__} adds the backbone to an optimizer, but "
                f"{type(pl_module).__name__}.configure_optimizers returned no optimizer. Return one with the "
                "parameters that are trainable from the start."
            )
        super().on_fit_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._optimizers = trainer.optimizers
        super().on_train_epoch_start(trainer, pl_module)
        self._optimizers = []

    def freeze_before_training(self, pl_module: TrainingModule) -> None:
        self.freeze(pl_module.backbone, train_bn=self.train_bn)

    def finetune_function(self, pl_module: TrainingModule, epoch: int, optimizer: Optimizer) -> None:
        index = next((index for index, one in enumerate(self._optimizers) if one is optimizer), 0)
        if epoch < self.unfreeze_backbone_at_epoch or (index > 0 and not self._every_optimizer):
            return
        current, previous = float(optimizer.param_groups[0]["lr"]), self.previous_backbone_lr
        if previous is None or index not in self._groups:
            rate = self._first_rate(current)
            before = len(optimizer.param_groups)
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, rate, train_bn=self.train_bn)
            self._groups[index] = before if len(optimizer.param_groups) > before else None
        else:
            rate = self.lambda_func(epoch + 1) * previous
            rate = min(rate, current) if self.should_align else rate
        self.previous_backbone_lr, group = rate, self._groups[index]
        if group is None:
            return
        optimizer.param_groups[group]["lr"] = rate
        if self.verbose:
            messages.info(
                f"Epoch {epoch}: learning rate {round(current, self.rounding)}, backbone {round(rate, self.rounding)}"
            )

    def _first_rate(self, current: float) -> float:
        if self.backbone_initial_lr is not None:
            return self.backbone_initial_lr
        if self.initial_denom_lr != _DENOMINATOR:
            return current / self.initial_denom_lr
        return current * self.backbone_initial_ratio_lr

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"previous_backbone_lr": self.previous_backbone_lr, "groups": self._groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
        self._groups = state_dict["groups"] if "groups" in state_dict else {0: state_dict["group"]}  # or of 0.1


_RATIO, _DENOMINATOR = 0.1, 10.0


def _check_rates(owner: str, ratio: float, rate: float | None, denominator: float) -> None:
    values = {"backbone_initial_ratio_lr": ratio, "backbone_initial_lr": rate, "initial_denom_lr": denominator}
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise TypeError(f"{owner}: {name}={value!r} is {messages.a(value)}, not a number. Pass a positive number.")
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{owner}({name}={value}) would keep the backbone from training. Pass a positive number.")
    defaults = {"backbone_initial_ratio_lr": _RATIO, "backbone_initial_lr": None, "initial_denom_lr": _DENOMINATOR}
    given = [name for name, value in values.items() if value != defaults[name]]
    if len(given) > 1:
        raise ValueError(
            f"{owner} got {messages.names(given, 'and')}, but only one of them can set the backbone's initial learning "
            "rate. Pass only one of them."
        )
