"""On two GPUs: calls are computed where their tensors are, to the same bits on either."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from test_cuda import FORMATS, KINDS, at_once, example
from torch import Tensor

import volup

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1),
    reason="no two GPUs of one kind",
)

Function = Callable[..., Tensor]


def block(
    x: Tensor, w: Tensor, b: Tensor, gamma: Tensor, beta: Tensor, precision: str | None
) -> Tensor:
    steps = {"activation": "relu", "norm_groups": 8, "post_activation": "silu"}
    norm = {"norm_weight": gamma, "norm_bias": beta}
    return volup.conv_transpose3d_block(x, w, b, 2, 1, **norm, **steps, precision=precision)


def conv(x: Tensor, w: Tensor, b: Tensor, *_norm: Tensor, precision: str | None) -> Tensor:
    return volup.conv_transpose3d(x, w, b, 2, 1, precision=precision)


FUNCTIONS = {"conv_transpose3d": conv, "block": block}


def tensors(
    dtype: torch.dtype, channels_last: bool = False, device: str = "cuda:0", seed: int = 0
) -> list[Tensor]:
    """An input, a weight, a bias, and the normalization's; the same values on each device."""
    with torch.cuda.device(0):
        x, w, b = example(dtype, seed)
        x = x.contiguous(memory_format=FORMATS[channels_last])
        return [t.to(device) for t in (x, w, b, b + 1, b - 1)]


def passes(function: Function, given: list[Tensor], precision: str | None) -> list[Tensor]:
    """A call's output without gradients, its output with them, and all of its gradients."""
    with torch.no_grad():
        plain = function(*given, precision=precision)
    leaves = [t.clone().requires_grad_() for t in given]
    output = function(*leaves, precision=precision)
    # Of the same values on each device.
    grad = torch.arange(output.numel(), device=output.device).remainder(17).sub(8)
    grad = grad.to(output.dtype).reshape(output.shape)
    gradients = torch.autograd.grad(output, leaves, grad, allow_unused=True)
    return [plain, output.detach(), *(g for g in gradients if g is not None)]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    """The same bits as on the first device, but on the second."""
    assert len(got) == len(expected)
    for there, here in zip(got, expected, strict=True):
        assert (there.device, here.device) == (torch.device("cuda:1"), torch.device("cuda:0"))
        assert (there.dtype, there.stride()) == (here.dtype, here.stride())
        assert torch.equal(there.cpu(), here.cpu())


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("channels_last", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_bits_whatever_the_current_device(
    name: str, kind: str, channels_last: bool, current: int
) -> None:
    dtype, precision = KINDS[kind]
    run = partial(passes, FUNCTIONS[name], precision=precision)
    expected = run(tensors(dtype, channels_last))
    with torch.cuda.device(current):
        assert_same(run(tensors(dtype, channels_last, "cuda:1")), expected)
        # Those of the first again, beside plans for the second.
        again = run(tensors(dtype, channels_last))
        assert all(torch.equal(*pair) for pair in zip(again, expected, strict=True))
        assert torch.cuda.current_device() == current


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_stream_of_the_other_device(name: str) -> None:
    run = partial(passes, FUNCTIONS[name], precision="ieee")
    expected = run(tensors(torch.float32, seed=1))
    given, values = (tensors(torch.float32, device="cuda:1", seed=seed) for seed in (0, 1))
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        # This made its device the current one.
        torch.cuda._sleep(50_000_000)
        for tensor, value in zip(given, values, strict=True):
            tensor.copy_(value)
        # And stays that device's stream where another is.
        with torch.cuda.device(0):
            got = run(given)
            assert torch.cuda.current_device() == 0
    stream.synchronize()
    assert_same(got, expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_devices_at_once(name: str) -> None:
    run = partial(passes, FUNCTIONS[name], precision="ieee")
    expected = run(tensors(torch.float32))
    given = [tensors(torch.float32, device=f"cuda:{i}") for i in range(2)]
    results: list[list[list[Tensor]]] = [[], []]

    # The current device of a new thread is the first.
    def work(i: int) -> None:
        results[i] += [run(given[i]) for _ in range(20)]

    at_once(work)
    torch.cuda.synchronize(1)
    here, there = results
    assert len(here) == len(there) == 20
    for got in here:
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    for got in there:
        assert_same(got, expected)


def test_tensors_of_both_devices_are_refused() -> None:
    x, w, *_ = tensors(torch.float32)
    with pytest.raises(RuntimeError, match="weight must be on cuda:1, got device cuda:0"):
        volup.conv_transpose3d(x.to("cuda:1"), w)
