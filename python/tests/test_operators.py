"""The operators as PyTorch sees them: its own checks, its compiler, autocast."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import B, W, X
from torch import Tensor
from torch.library import opcheck

import volup

OPS = torch.ops.volup
CONV = ([2, 2, 2], [1, 1, 1], [0, 0, 0], 1, [1, 1, 1])
STEPS = ("silu", 0.01, 3, 1e-5, "leaky_relu", 0.2)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def arguments(name: str, input: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """What an operator takes."""
    channels_last = input.is_contiguous(memory_format=torch.channels_last_3d)
    bias, scale, shift = (leaf(B.to(input.device)) for _ in range(3))
    rest = (*CONV, *STEPS, None, channels_last)
    if name.startswith("conv_transpose3d_block"):
        tensors = (input, weight, bias, scale, shift)
        if name.endswith("grad"):
            output, *kept = OPS.conv_transpose3d_block_training(
                *(t.detach() for t in tensors), *rest
            )
            grad = leaf(torch.randn_like(output))
            if name == "conv_transpose3d_block_grad":
                return grad, *tensors, *kept, *rest[:-1], [True] * 5
            return grad, *tensors, *rest, [True] * 5
        return *tensors, *rest
    if name == "conv_transpose3d":
        return input, weight, bias, *CONV, None, channels_last
    grad = leaf(volup.conv_transpose3d(input, weight, None, 2, 1).detach())
    if name == "conv_transpose3d_input_grad":
        return grad, weight, *CONV, None, channels_last
    return input, grad, list(weight.shape[2:]), *CONV, None


NAMES = (
    "conv_transpose3d",
    "conv_transpose3d_input_grad",
    "conv_transpose3d_weight_grad",
    "conv_transpose3d_block",
    "conv_transpose3d_block_training",
    "conv_transpose3d_block_grad",
    "conv_transpose3d_block_recomputed_grad",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, channels_last: bool) -> None:
    input = X.to(memory_format=torch.channels_last_3d) if channels_last else X
    opcheck(getattr(OPS, name).default, arguments(name, leaf(input), leaf(W)))


def by_functions(input: Tensor, weight: Tensor) -> Tensor:
    input = volup.conv_transpose3d(input * 2, weight, B, (2, 1, 2), 1)
    return input.sin() + 1


def by_block(input: Tensor, weight: Tensor) -> Tensor:
    options = {"activation": "gelu", "norm_groups": 3, "post_activation": ("leaky_relu", 0.2)}
    return volup.conv_transpose3d_block(input * 2, weight, B, 2, **options).cos()


def saving(input: Tensor, weight: Tensor) -> Tensor:
    return volup.conv_transpose3d_block(input, weight, activation="relu", memory="save") * 2


def unbatched(input: Tensor, weight: Tensor) -> Tensor:
    return volup.conv_transpose3d_block(input[0], weight, B, norm_groups=2)


def mixed(input: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return volup.conv_transpose3d(input, weight, B).float()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [by_functions, by_block, saving, unbatched, mixed])
def test_compiled_code_holds_the_operators(
    function: Callable[[Tensor, Tensor], Tensor], dynamic: bool
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for input in (X, X[:, :, :2, :, 1:]) if dynamic else (X,):
        tensors = leaf(input), leaf(W)
        got, expected = compiled(*tensors), function(*tensors)
        torch.testing.assert_close(got, expected)
        grad = torch.randn_like(expected)
        for ours, theirs in zip(
            torch.autograd.grad(got, tensors, grad),
            torch.autograd.grad(expected, tensors, grad),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*tensors), expected)


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers() -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(
        volup.nn.ConvTranspose3dBlock(4, 6, 3, 2, norm_groups=2, post_activation="silu"),
        volup.nn.ConvTranspose3d(6, 1, 2),
    )
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), model(X))
    compiled(X).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_operators_cast_as_autocast_says() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        got = OPS.conv_transpose3d(X, W, B, *CONV, None, False)
        assert got.dtype == torch.bfloat16
        double = OPS.conv_transpose3d(X.double(), W.double(), None, *CONV, None, False)
        assert double.dtype == torch.float64


def test_operators_refuse_what_the_functions_refuse() -> None:
    with pytest.raises(RuntimeError, match="input must have 4 channels"):
        OPS.conv_transpose3d(X[:, :3], W, None, *CONV, None, False)
    with pytest.raises(RuntimeError, match="grad_output must have shape"):
        OPS.conv_transpose3d_weight_grad(X, X, [3, 3, 3], *CONV, None)
    with pytest.raises(RuntimeError, match="weight must have dtype float32, got float64"):
        OPS.conv_transpose3d_input_grad(torch.randn(2, 6, 5, 7, 9), W.double(), *CONV, None, False)
