"""A training program that is set up from its command line: precision, compiling, processes, trackers, folders.

    python examples/10_parsed_arguments.py --log_prefix digits- --mixed_precision bf16
    python examples/10_parsed_arguments.py --log_with all --gradient_accumulation_steps 4
    python examples/10_parsed_arguments.py --dynamo_backend inductor --dynamo_mode max-autotune
    paceline launch --num_processes 2 examples/10_parsed_arguments.py --ddp_gradient_as_bucket_view

What is not given here is left to `paceline launch`, the environment and the config file: None means not set.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import (
    Accelerator,
    DistributedDataParallelKwargs,
    DynamoBackend,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
    set_seed,
)

TRACKERS = ("tensorboard", "wandb", "csv", "all")
BACKENDS = ("no", "eager", "aot_eager", "inductor", "cudagraphs", "onnxrt")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="None: as launch or the config file says")
    add("--gradient_accumulation_steps", type=int, help="micro-batches that make one step")
    add("--out", "--logging_dir", dest="logging_dir", default="runs/parsed", help="folder of logs; empty: none")
    add("--log_prefix", default="", help="put before the time in the name of the run's folder")
    add("--log_with", choices=TRACKERS, help="default: tensorboard if there is a folder")
    add("--wandb_api_key", help="log in to wandb with it")
    add("--wandb_run_name", help="the name shown for the run")
    add("--dynamo_backend", default="no", help=f"compile the model: {', '.join(BACKENDS)}, in any case")
    add("--dynamo_mode", choices=["default", "reduce-overhead", "max-autotune"])
    add("--dynamo_fullgraph", action="store_true")
    add("--dynamo_dynamic", action="store_true")
    add("--ddp_timeout", type=int, help="minutes that processes wait for each other")
    add("--ddp_gradient_as_bucket_view", action="store_true")
    add("--ddp_static_graph", action="store_true")
    add("--epochs", type=int, default=5)
    add("--fast", action="store_true", help="one epoch, to see that it runs")
    return parser.parse_args(words)


def accelerator_of(args: argparse.Namespace) -> Accelerator:
    """Make the Accelerator that the command line asks for."""
    return Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with=args.log_with or ("tensorboard" if args.logging_dir else None),
        project_dir=project_dir_of(args),
        dynamo_plugin=dynamo_of(args),
        kwargs_handlers=handlers_of(args),
    )


def project_dir_of(args: argparse.Namespace) -> str | None:
    """A folder of its own for each run; wandb keeps its files there too."""
    if not args.logging_dir:
        return None
    folder = os.path.join(args.logging_dir, args.log_prefix + time.strftime("%Y%m%d%H%M%S"))
    if args.log_with in ("wandb", "all"):
        os.makedirs(folder, exist_ok=True)
        os.environ["WANDB_DIR"] = folder
        if args.wandb_api_key:
            import wandb

            wandb.login(key=args.wandb_api_key)
    return folder


def dynamo_of(args: argparse.Namespace) -> TorchDynamoPlugin | None:
    """How models are compiled, if they are."""
    if args.dynamo_backend.lower() == "no":
        return None
    return TorchDynamoPlugin(
        backend=DynamoBackend(args.dynamo_backend.upper()),
        mode=args.dynamo_mode,
        fullgraph=args.dynamo_fullgraph,
        dynamic=args.dynamo_dynamic,
    )


def handlers_of(args: argparse.Namespace) -> list[Any]:
    """How processes meet and how gradients are reduced, as far as the command line says."""
    windows = os.name == "nt"
    group = InitProcessGroupKwargs(
        backend="gloo" if windows or not torch.cuda.is_available() else "nccl",
        init_method="env://?use_libuv=False" if windows else None,
        timeout=timedelta(minutes=args.ddp_timeout) if args.ddp_timeout else None,
    )
    replicas = DistributedDataParallelKwargs(
        gradient_as_bucket_view=args.ddp_gradient_as_bucket_view, static_graph=args.ddp_static_graph
    )
    wanted = args.ddp_gradient_as_bucket_view or args.ddp_static_graph
    return [handler for handler in (group, replicas if wanted else None) if handler is not None]


def train(args: argparse.Namespace) -> float:
    """Train a small network; returns the last epoch's mean loss over all processes."""
    accelerator = accelerator_of(args)
    set_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader_of(), scheduler)
    if accelerator.is_main_process:
        named = {"wandb": {"name": args.wandb_run_name}} if args.wandb_run_name else {}
        accelerator.init_trackers("parsed", config=vars(args), init_kwargs=named)
    mean, step = float("nan"), 0
    for epoch in range(1 if args.fast else args.epochs):
        losses = []
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            losses.append(loss.detach())
        mean = accelerator.gather(torch.stack(losses)).mean().item()
        if len(accelerator.trackers) > 0:
            accelerator.log({"loss/epoch": mean, "lr": scheduler.get_last_lr()[0]}, step=step)
        accelerator.print(f"epoch {epoch}: loss {mean:.4f} after {step} steps")
    accelerator.end_training()
    return mean


def loader_of() -> DataLoader:
    """Four classes of points in 16 dimensions."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(4, 16, generator=generator)
    labels = torch.randint(4, (1024,), generator=generator)
    points = centers[labels] + torch.randn(1024, 16, generator=generator)
    return DataLoader(TensorDataset(points, labels), batch_size=32, shuffle=True)


if __name__ == "__main__":
    train(parse())
