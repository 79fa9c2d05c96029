"""The same training in several processes: by hand, with Paceline, Lightning and Accelerate.

Every process of a contestant gets the batches of its rank, ready made. ``run(job)`` builds everything, trains
and returns the network.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from measuring import CLOCK, LR, SEED, Net, Task
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job(Task):
    """One training: of a linear layer with SGD, or of a transformer with ``layers`` blocks and AdamW.

    Attributes:
        parallel: ``"none"`` (one process), ``"ddp"`` or ``"fsdp"``.
        steps: batches of one rank, as the other counts.
    """

    parallel: str = "ddp"
    layers: int = 0
    context: int = 32
    vocabulary: int = 256
    precision: str = "32-true"
    device: str = "cpu"

    @property
    def place(self) -> torch.device:
        return torch.device(self.device, torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")


class Block(nn.Module):
    """A block of a causal transformer: attention, then two linear layers, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attend(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class Transformer(nn.Module):
    """Predicts the next token; its forward ticks the clock."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.tokens = nn.Embedding(job.vocabulary, job.width)
        self.places = nn.Embedding(job.context, job.width)
        self.blocks = nn.ModuleList([Block(job.width) for _ in range(job.layers)])
        self.norm = nn.LayerNorm(job.width)
        self.head = nn.Linear(job.width, job.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        CLOCK.tick()
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def network(job: Job) -> nn.Module:
    return Transformer(job) if job.layers else Net(job)


def blocks(net: nn.Module) -> list[nn.Module]:
    """What is sharded one by one."""
    return list(net.blocks) if isinstance(net, Transformer) else []


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    out = net(x)
    return mse_loss(out, y) if y.is_floating_point() else cross_entropy(out.flatten(0, 1), y.flatten())


def optimizer_of(net: nn.Module, job: Job) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=LR / 10) if job.layers else torch.optim.SGD(net.parameters(), lr=LR)


def weights(net: nn.Module) -> float:
    """Differs when weights differ; gathers those that are sharded, so that every rank has to call."""
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return sum(p.detach().double().abs().sum().item() for p in found)


class Batches:
    """Ready batches, of 64 different ones over and over: this rank's, every so many-th."""

    def __init__(self, job: Job) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(SEED)
        if job.layers:
            text = torch.randint(job.vocabulary, (64, job.batch_size, job.context + 1), generator=generator)
            distinct = [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in text]
        else:
            x = torch.randn(64, job.batch_size, job.width, generator=generator)
            distinct = list(zip(x, torch.randn(64, job.batch_size, 2, generator=generator), strict=True))
        self.batches = [distinct[i % 64] for i in range(rank, job.batches * world, world)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class Contestant:
    module: ClassVar[str] = "torch"

    @classmethod
    def available(cls) -> bool:
        return find_spec(cls.module) is not None

    @classmethod
    def can(cls, job: Job) -> bool:
        """Whether it has a way to do this job."""
        return True

    def run(self, job: Job) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.train(job, network(job))

    def train(self, job: Job, net: nn.Module) -> nn.Module:
        raise NotImplementedError


class Raw(Contestant):
    """By hand, on DistributedDataParallel or fully_shard."""

    def train(self, job: Job, net: nn.Module) -> nn.Module:
        model = self.prepare(job, net.to(job.place))
        optimizer = optimizer_of(net, job)
        if job.accumulate > 1:
            self.accumulating(job, model, optimizer)
        elif job.device == "cpu" and job.precision == "32-true":
            for batch in Batches(job):
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            self.on_device(job, model, optimizer)
        return net

    def prepare(self, job: Job, net: nn.Module) -> nn.Module:
        if job.parallel == "ddp":
            return nn.parallel.DistributedDataParallel(net)
        if job.parallel == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for block in blocks(net):
                fully_shard(block)
            fully_shard(net)
        return net

    def on_device(self, job: Job, model: nn.Module, optimizer: Any) -> None:
        place, mixed = job.place, job.precision == "bf16-mixed"
        for x, y in Batches(job):
            batch = (x.to(place, non_blocking=True), y.to(place, non_blocking=True))
            with torch.autocast(place.type, torch.bfloat16, enabled=mixed):
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def accumulating(self, job: Job, model: Any, optimizer: Any) -> None:
        for i, batch in enumerate(Batches(job), 1):
            complete = i % job.accumulate == 0 or i == job.batches
            quiet = contextlib.nullcontext()
            if job.parallel == "fsdp":
                model.set_requires_gradient_sync(complete)
            elif not complete:
                quiet = model.no_sync()
            with quiet:
                (loss_of(model, batch) / job.accumulate).backward()
            if complete:
                optimizer.step()
                optimizer.zero_grad()


def user_module(base: type, job: Job) -> type:
    """What a user of Paceline or Lightning writes."""

    class UserModule(base):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net, job)

    return UserModule


def trainer_options(job: Job) -> dict[str, Any]:
    return {
        "max_epochs": 1,
        "accelerator": "gpu" if job.device == "cuda" else "cpu",
        "devices": dist.get_world_size() if job.parallel != "none" else 1,
        "precision": job.precision,
        "accumulate_grad_batches": job.accumulate,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


class Paceline(Contestant):
    module = "paceline"

    def train(self, job: Job, net: nn.Module) -> nn.Module:
        import paceline

        strategy = {"none": "auto"}.get(job.parallel, job.parallel)
        trainer = paceline.Trainer(strategy=strategy, **trainer_options(job))
        trainer.fit(user_module(paceline.TrainingModule, job)(net), Batches(job))
        return net


class Lightning(Contestant):
    """Its FSDPStrategy is the first FSDP, for GPUs only; fully_shard goes through ModelParallelStrategy."""

    module = "pytorch_lightning"

    def train(self, job: Job, net: nn.Module) -> nn.Module:
        for name in ("pytorch_lightning", "lightning_fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        import pytorch_lightning
        from pytorch_lightning.strategies import ModelParallelStrategy
        from torch.distributed.fsdp import fully_shard

        class Sharded(user_module(pytorch_lightning.LightningModule, job)):
            def configure_model(self) -> None:
                mesh = self.device_mesh["data_parallel"]
                for block in blocks(self.net):
                    fully_shard(block, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        plain = user_module(pytorch_lightning.LightningModule, job)
        strategy: Any = {"none": "auto"}.get(job.parallel, job.parallel)
        if job.parallel == "fsdp":
            strategy = ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
        trainer = pytorch_lightning.Trainer(strategy=strategy, **trainer_options(job))
        trainer.fit((Sharded if job.parallel == "fsdp" else plain)(net), Batches(job))
        return net


class Accelerate(Contestant):
    """A hand-written loop on Accelerate, as its documentation shows it. Its FSDP is for GPUs only (on the CPU: DDP)."""

    module = "accelerate"

    @classmethod
    def can(cls, job: Job) -> bool:
        return job.parallel != "fsdp" or job.device == "cuda"

    def train(self, job: Job, net: nn.Module) -> nn.Module:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState, GradientState

        # In one process a second Accelerator would go on with the first one's settings.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ["ACCELERATE_USE_CPU"] = str(job.device == "cpu").lower()
        plugin = None
        if job.parallel == "fsdp":
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
            )
        accelerator = Accelerator(
            cpu=job.device == "cpu",
            gradient_accumulation_steps=job.accumulate,
            mixed_precision={"bf16-mixed": "bf16"}.get(job.precision, "no"),
            fsdp_plugin=plugin,
        )
        model, optimizer = accelerator.prepare(net, optimizer_of(net, job))
        place = accelerator.device
        for batch in Batches(job):
            if job.device == "cuda":
                batch = tuple(part.to(place, non_blocking=True) for part in batch)
            with accelerator.accumulate(model) if job.accumulate > 1 else contextlib.nullcontext():
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.free_memory()
        return net


CONTESTANTS: dict[str, type[Contestant]] = {
    "by hand": Raw,
    "paceline": Paceline,
    "lightning": Lightning,
    "accelerate": Accelerate,
}
