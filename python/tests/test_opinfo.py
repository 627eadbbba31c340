"""PyTorch's own samples for its operators."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

import volup

CONV = next(op for op in op_db if op.name == "nn.functional.conv_transpose3d")
NORM = next(op for op in op_db if op.name == "nn.functional.group_norm")
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conv_samples(dtype: torch.dtype) -> None:
    samples = list(CONV.sample_inputs("cpu", dtype))
    assert samples
    for sample in samples:
        got = volup.conv_transpose3d(sample.input, *sample.args, **sample.kwargs)
        theirs = CONV(sample.input, *sample.args, **sample.kwargs)
        assert got.stride() == theirs.stride()
        # Sums of a few hundred products of numbers up to 9, in another order.
        torch.testing.assert_close(got, theirs, rtol=1e-5, atol=5e-4)


def test_conv_error_samples() -> None:
    if CONV.error_inputs_func is None:
        pytest.skip("this PyTorch has none")
    for error in CONV.error_inputs("cpu"):
        sample = error.sample_input
        with pytest.raises(error.error_type):
            volup.conv_transpose3d(sample.input, *sample.args, **sample.kwargs)


def norm_by_block(
    input: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """group_norm as the norm of a block whose convolution changes nothing."""
    channels = input.shape[1] if input.dim() > 1 else 0
    volume = input.reshape(*input.shape[:2], math.prod(input.shape[2:]), 1, 1)
    identity = torch.ones(channels, 1, 1, 1, 1, dtype=input.dtype)
    output = volup.conv_transpose3d_block(
        volume,
        identity,
        groups=channels,
        norm_groups=groups,
        norm_weight=weight,
        norm_bias=bias,
        eps=eps,
    )
    return output.reshape(input.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_samples(dtype: torch.dtype) -> None:
    samples = list(NORM.sample_inputs("cpu", dtype))
    assert samples
    for sample in samples:
        if sample.kwargs.get("eps", 1e-5) < 0:
            # PyTorch takes the root of what may be negative; volup does not.
            with pytest.raises(ValueError, match="eps must be finite and not negative"):
                norm_by_block(sample.input, *sample.args, **sample.kwargs)
            continue
        got = norm_by_block(sample.input, *sample.args, **sample.kwargs)
        theirs = NORM(sample.input, *sample.args, **sample.kwargs)
        torch.testing.assert_close(got, theirs)


def test_norm_error_samples() -> None:
    errors = list(NORM.error_inputs("cpu"))
    assert errors
    for error in errors:
        sample = error.sample_input
        with pytest.raises(error.error_type):
            norm_by_block(sample.input, *sample.args, **sample.kwargs)
