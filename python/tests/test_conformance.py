"""Every case of the engines' table in every type, against PyTorch."""

import pytest
import reference
import torch
from torch import Tensor

import volup
from volup import _native

CASES = {case["name"]: case for case in _native.cases()}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

# The narrow types are compared with float64 alone. PyTorch rounds them after each step, and in
# bfloat16 it leaves the bias out where no tap reaches a voxel (stride over kernel, output_padding).
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


def tensors_of(case: dict, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor | None]]:
    """An input and parameters, the same for the same case."""
    spec = case["block"]
    generator = torch.Generator().manual_seed(sum(map(ord, case["name"])))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    batch = [] if case["batch"] is None else [case["batch"]]
    input = normal(*batch, spec["in_channels"], *case["input"]).to(dtype)
    if case["channels_last"]:
        input = input.contiguous(memory_format=torch.channels_last_3d)
    kernel, stride = spec["kernel_size"], spec["stride"]
    terms = spec["in_channels"] // spec["groups"]
    for k, s in zip(kernel, stride, strict=True):
        terms *= -(-k // s)
    out = spec["out_channels"]
    weight = normal(spec["in_channels"], out // spec["groups"], *kernel) / terms**0.5
    affine = spec["norm_groups"] is not None and spec["affine"]
    return input, {
        "weight": weight.to(dtype),
        "bias": normal(out).to(dtype) if spec["bias"] else None,
        "norm_weight": normal(out).to(dtype) if affine else None,
        "norm_bias": normal(out).to(dtype) if affine else None,
    }


def run(input: Tensor, parameters: dict, spec: dict) -> Tensor:
    keys = ("stride", "padding", "output_padding", "groups", "dilation")
    steps = ("activation", "norm_groups", "eps", "post_activation")
    options = {key: spec[key] for key in keys + steps}
    return volup.conv_transpose3d_block(input, **parameters, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    spec = case["block"]
    input, parameters = tensors_of(case, dtype)
    got = run(input, parameters, spec)
    assert got.dtype == dtype
    reference.assert_within(got, *reference.expected(input, parameters, spec))

    theirs = reference.block(input, parameters, spec)
    assert got.stride() == theirs.stride()
    if dtype in TOLERANCE:
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got, theirs, rtol=tolerance, atol=tolerance)


def test_special_values_go_through() -> None:
    input = torch.randn(2, 3, 4, 5, 6)
    weight = torch.randn(3, 4, 3, 3, 3)
    for special in (float("nan"), float("inf"), -float("inf")):
        input[0, 1, 2, 2, 2] = special
        for activation in (None, "relu", "leaky_relu", "sigmoid", "tanh"):
            got = volup.conv_transpose3d_block(input, weight, None, 2, 1, activation=activation)
            theirs = torch.nn.functional.conv_transpose3d(input, weight, None, 2, 1)
            theirs = reference.activate(activation, theirs)
            torch.testing.assert_close(got, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_nan_stays_in_its_group() -> None:
    input = torch.randn(2, 3, 4, 5, 6)
    input[0, 1, 2, 2, 2] = float("nan")
    weight = torch.randn(3, 2, 3, 3, 3)
    got = volup.conv_transpose3d_block(input, weight, activation="relu", norm_groups=1)
    assert got[0].isnan().all()
    assert not got[1].isnan().any()
