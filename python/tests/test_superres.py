"""The example's training: volup's layers and PyTorch's give the same losses."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "superres"
# The demo's decoder, narrower.
LAYERS = [(1, 8, 3, 1, 1, 4), (8, 8, 4, 2, 1, 4), (8, 1, 3, 1, 1, None)]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("superres_train", FOLDER / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("volume", None)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        # Both do as PyTorch's flag says, which would be tf32.
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return request.param


# In float32 a difference of a rounding grows a little from step to step.
@pytest.mark.parametrize(
    ("dtype", "steps", "apart"), [(torch.float32, 200, 1e-3), (torch.float64, 60, 1e-9)], ids=str
)
def test_losses_are_pytorchs_throughout(
    example: ModuleType, device: str, dtype: torch.dtype, steps: int, apart: float
) -> None:
    noise = torch.randn(1, 1, 18, 160, 18, generator=torch.Generator().manual_seed(0))
    volume = torch.nn.functional.avg_pool3d(noise, 3, 1, 1)[0, 0].relu().numpy()
    options = {"device": device, "steps": steps, "seed": 0, "layers": LAYERS, "size": 14}
    options["dtype"] = dtype
    ours, theirs = (
        example.train(volume, modules=modules, **options)[1] for modules in ("volup", "torch")
    )
    assert theirs[-1] < 0.95 * theirs[0]
    assert example.farthest_apart(ours, theirs) < apart
