"""How much memory loading and running take, each in a process of its own; the sizes are large against its noise."""

from __future__ import annotations

from pathlib import Path

import pytest
from big_models import MEMORY, program

pytestmark = pytest.mark.cold

MB = 10**6
#: For what is no weight: inputs, outputs, stacks, code that is read when it first runs; and pages around those read.
ALLOWED = 12 * MB

SETUP = (
    MEMORY
    + """
import torch
from torch import nn
from big_models import Net, empty, write
from paceline import load_checkpoint_and_dispatch, load_checkpoint_in_model
WIDTH = 1024
BLOCK = (4 * WIDTH * WIDTH + 7 * WIDTH) * 4  # 16.8 MB

def make():
    return Net(24, WIDTH)

def warm():  # what code and kernels need
    for dtype in (torch.float32, torch.bfloat16):
        nn.Linear(8, 8).to(dtype)(torch.ones(2, 8, dtype=dtype)).to(torch.float32)
    path = write(Net(2, 64).state_dict(), Path("warm.safetensors"))
    for limit in ("1GB", "120kB"):
        load_checkpoint_and_dispatch(empty(Net, 2, 64), path, "auto", {"cpu": limit})(torch.ones(2, 64))

torch.manual_seed(0)
"""
)

WRITE = (
    SETUP
    + """
model = make().eval()
state = model.state_dict()
write(state, Path("aligned.safetensors"))
write(state, Path("misaligned.safetensors"), misaligned=True)
x = torch.ones(4, WIDTH)
with torch.no_grad():
    torch.save((x, model(x)), "expected.pt")
print(json.dumps({"size": sum(tensor.nbytes for tensor in {id(t): t for t in model.parameters()}.values())}))
"""
)

RUN = (
    SETUP
    + """
warm()
kind, limit = sys.argv[1:]
before = reset_peak()
model = load_checkpoint_and_dispatch(
    empty(make), f"{kind}.safetensors", "auto", {"cpu": int(limit)}, no_split_module_classes=["Block"]
).eval()
loaded = status("VmHWM") - before
x, expected = torch.load("expected.pt")
same = []
with torch.no_grad():
    for _ in range(2):
        same.append(torch.equal(model(x), expected))
running = status("VmHWM") - before
try:
    model.blocks[20](x[:, :3])
except RuntimeError:
    pass
after = status("VmRSS") - before
disk = sum(1 for device in model.hf_device_map.values() if device == "disk")
print(json.dumps({
    "loaded": loaded, "running": running, "after": after, "same": same, "disk": disk, "block": BLOCK
}))
"""
)

STREAM = (
    SETUP
    + """
warm()
kind, form = sys.argv[1:]
found = {}
model = make() if form == "made" else empty(make)
before = reset_peak()
load_checkpoint_in_model(model, f"{kind}.safetensors", dtype="bfloat16" if form == "bfloat16" else None)
print(json.dumps({"grown": status("VmHWM") - before, "size": sum(t.nbytes for t in model.parameters())}))
"""
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of a model of 407 MB."""
    folder = tmp_path_factory.mktemp("weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert program(WRITE)["size"] > 400 * MB
    return folder


@pytest.mark.parametrize("kind", ["aligned", "misaligned"])
def test_i6_memory_stays_under_the_limit_and_one_block(
    kind: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(weights)
    limit = 120 * MB
    found = program(RUN, kind, limit)
    assert found["same"] == [True, True]
    assert found["disk"] > 10
    assert found["loaded"] < limit + ALLOWED
    assert found["running"] < limit + found["block"] + ALLOWED
    assert found["after"] < limit - found["block"] + ALLOWED, "what was fetched stays after the run"


@pytest.mark.parametrize("form", ["meta", "bfloat16", "made"])
def test_loading_takes_no_more_than_the_model_and_a_chunk(
    form: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(weights)
    found = program(STREAM, "aligned", form)
    chunk = 16 * 2**20
    whole = 0 if form == "made" else found["size"]
    assert whole * 0.9 < found["grown"] < whole * 1.05 + chunk
