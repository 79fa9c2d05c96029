"""diffusers: a script that trains a network on images, written like the library's examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import tiny
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel


def network() -> Any:
    """Return a network for images of 8 x 8 pixels."""
    accelerate.utils.set_seed(tiny.SEED)
    sizes: dict[str, Any] = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1}
    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    channels = {"block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 8, "dropout": 0.1}
    return UNet2DModel(**sizes, **kinds, **channels)


def register_hooks(accelerator: Any, average: Any) -> None:
    """Make saved states contain the network and its average in the library's own format."""

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            average.save_pretrained(str(Path(output_dir) / "average"))
            for one in models:
                one.save_pretrained(str(Path(output_dir) / "unet"))
                weights.pop()

    def load(models: list[Any], input_dir: str) -> None:
        loaded = EMAModel.from_pretrained(str(Path(input_dir) / "average"), UNet2DModel)
        average.load_state_dict(loaded.state_dict())
        while models:
            one = models.pop()
            saved = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            one.register_to_config(**saved.config)
            one.load_state_dict(saved.state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def generated(model: Any, noises: Any) -> float:
    """Return the mean of an image that the network generates."""
    picture = DDPMPipeline(unet=model, scheduler=noises)
    picture.set_progress_bar_config(disable=True)
    made = picture(batch_size=1, num_inference_steps=4, generator=torch.Generator().manual_seed(0), output_type="np")
    return float(made.images.mean())


def train(accelerator: Any, folder: Path, *, scheduled: bool = True, resume: bool = False) -> list[float]:
    """Train for two epochs, or only for the second."""
    model = network()
    average = EMAModel(model.parameters(), decay=0.99, model_cls=UNet2DModel, model_config=model.config)
    register_hooks(accelerator, average)
    noises = DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=4, shuffle=True)
    steps = len(loader) * 2 // accelerator.gradient_accumulation_steps
    name = "cosine" if scheduled else "constant"
    schedule = get_scheduler(name, optimizer, num_warmup_steps=5, num_training_steps=steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.init_trackers("train_unconditional")
    if resume:
        accelerator.load_state(str(folder / "checkpoint"))
    seen: list[float] = []
    for epoch in range(int(resume), 2):
        model.train()
        for (clean,) in loader:
            noise = torch.randn(clean.shape)
            times = torch.randint(0, 50, (len(clean),)).long()
            with accelerator.accumulate(model):
                predicted = model(noises.add_noise(clean, noise, times), times).sample
                loss = torch.nn.functional.mse_loss(predicted, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
            seen.append(loss.detach().item())
            accelerator.log({"loss": seen[-1], "lr": schedule.get_last_lr()[0]}, step=len(seen))
        if epoch == 0:
            accelerator.save_state(str(folder / "checkpoint"))
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    average.copy_to(unwrapped.parameters())
    return [*seen, generated(unwrapped, noises)]


def accelerator_of(folder: Path, windows: int) -> Any:
    """Return the script's Accelerator, with a tracker."""
    project = accelerate.utils.ProjectConfiguration(str(folder), logging_dir=str(folder / "logs"))
    return accelerate.Accelerator(
        gradient_accumulation_steps=windows, log_with="tensorboard", project_config=project, cpu=True
    )


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("scheduled", [True, False], ids=["scheduled", "constant"])
@pytest.mark.parametrize("windows", [1, 2])
def test_training(record_losses: Callable[..., None], windows: int, scheduled: bool, processes: int) -> None:
    def script(folder: Path) -> list[float]:
        accelerator = accelerator_of(folder, windows)
        losses = train(accelerator, folder, scheduled=scheduled)
        accelerator.end_training()
        return losses

    record_losses(script, processes)


@pytest.mark.parametrize("processes", [1, 2])
def test_resuming(record_losses: Callable[..., None], processes: int) -> None:
    def script(folder: Path) -> list[float]:
        train(accelerator_of(folder, 1), folder, scheduled=False)
        return train(accelerator_of(folder, 1), folder, scheduled=False, resume=True)

    record_losses(script, processes)
