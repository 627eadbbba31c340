"""Every broken rule: its class, which is PyTorch's, and its text, which is Rust's."""

import re

import pytest
import torch
import torch.nn.functional as F
from samples import B, W, X

import volup

CONV_ERRORS = [
    (TypeError, "argument 'input' must be Tensor, not list", {"input": [1.0]}),
    (TypeError, "argument 'weight' must be Tensor, not NoneType", {"weight": None}),
    (TypeError, "argument 'bias' must be Tensor, not float", {"bias": 1.0}),
    (TypeError, "argument 'groups' must be int, not bool", {"groups": True}),
    (TypeError, "argument 'groups' must be int, not float", {"groups": 1.0}),
    (TypeError, "argument 'stride' must be int or tuple of ints, not bool", {"stride": True}),
    (TypeError, "argument 'stride' must be int or tuple of ints, not bool", {"stride": [True] * 3}),
    (TypeError, "argument 'stride' must be int or tuple of ints, not float", {"stride": 1.0}),
    (TypeError, "argument 'stride' must be int or tuple of ints, not float", {"stride": [1.0] * 3}),
    (TypeError, "argument 'padding' must be int or tuple of ints, not str", {"padding": "same"}),
    (
        TypeError,
        "argument 'dilation' must be int or tuple of ints, not NoneType",
        {"dilation": None},
    ),
    (TypeError, "argument 'stride' must be int or tuple of ints, not set", {"stride": {2}}),
    (ValueError, "argument 'stride' does not fit in 64 bits", {"stride": 2**70}),
    (ValueError, "precision must be one of ieee, tf32, got 'fp8'", {"precision": "fp8"}),
    (
        RuntimeError,
        "stride must be one integer or a list of 3 (depth, height, width), got 2 values",
        {"stride": [2, 2]},
    ),
    (
        RuntimeError,
        "padding must be one integer or a list of 3 (depth, height, width), got 0 values",
        {"padding": []},
    ),
    (RuntimeError, "stride must be positive, got 0", {"stride": 0}),
    (RuntimeError, "stride must be positive, got -1", {"stride": (1, -1, 1)}),
    (RuntimeError, "padding must not be negative, got -1", {"padding": -1}),
    (RuntimeError, "output_padding must not be negative, got -1", {"output_padding": -1}),
    (
        RuntimeError,
        "output_padding must be smaller than either stride or dilation, got output_padding 1 "
        "with stride 1 and dilation 1 along depth",
        {"output_padding": 1},
    ),
    (RuntimeError, "dilation must be positive, got 0", {"dilation": 0}),
    (RuntimeError, "groups must be positive, got 0", {"groups": 0}),
    (RuntimeError, "groups must be positive, got -1", {"groups": -1}),
    (
        RuntimeError,
        "in_channels must be divisible by groups, got in_channels 4 with groups 3",
        {"groups": 3},
    ),
    (RuntimeError, "output size along depth must be at least 1, got -13", {"padding": 9}),
    (
        RuntimeError,
        "input must be 4-D (unbatched) or 5-D (batched), got 3 dimensions",
        {"input": X[0, 0]},
    ),
    (
        RuntimeError,
        "input must be 4-D (unbatched) or 5-D (batched), got 6 dimensions",
        {"input": X[None]},
    ),
    (
        RuntimeError,
        "weight must be 5-D (in, out/groups, depth, height, width), got 4 dimensions",
        {"weight": W[0]},
    ),
    (RuntimeError, "input must have 4 channels (in_channels), got 3", {"input": X[:, :3]}),
    (RuntimeError, "input must have 4 channels (in_channels), got 3", {"input": X[0, :3]}),
    (RuntimeError, "bias must have shape [6], got [3]", {"bias": B[:3]}),
    (RuntimeError, "bias must have shape [6], got [1, 6]", {"bias": B[None]}),
    (RuntimeError, "bias must have shape [6], got []", {"bias": B[0]}),
    (
        RuntimeError,
        "input must not be empty along depth: only the batch may have size 0",
        {"input": X[:, :, :0]},
    ),
    (RuntimeError, "in_channels must be positive, got 0", {"input": X[:, :0], "weight": W[:0]}),
    (RuntimeError, "out_channels must be positive, got 0", {"weight": W[:, :0], "bias": None}),
    (RuntimeError, "kernel_size must be positive, got 0", {"weight": W[..., :0]}),
    (RuntimeError, "weight must have dtype float32, got float64", {"weight": W.double()}),
    (RuntimeError, "bias must have dtype float32, got bfloat16", {"bias": B.bfloat16()}),
    (RuntimeError, "the output size overflows the address space", {"stride": 2**62}),
    (RuntimeError, "the number of elements overflows the address space", {"stride": 2**40}),
]
BLOCK_ERRORS = [
    (
        ValueError,
        "activation must be one of relu, leaky_relu, silu, gelu, gelu_tanh, hardswish, sigmoid, "
        'tanh, got "mish"',
        {"activation": "mish"},
    ),
    (ValueError, "activation must be one of", {"post_activation": ("mish", 0.1)}),
    (ValueError, "relu takes no slope, got 0.1", {"activation": ("relu", 0.1)}),
    (
        ValueError,
        "negative_slope must be finite, got NaN",
        {"activation": ("leaky_relu", float("nan"))},
    ),
    (
        TypeError,
        "argument 'activation' must be str, (\"leaky_relu\", float) or None, not function",
        {"activation": F.relu},
    ),
    (TypeError, "argument 'norm_groups' must be int, not bool", {"norm_groups": True}),
    (TypeError, "argument 'norm_groups' must be int, not float", {"norm_groups": 2.0}),
    (TypeError, "eps", {"norm_groups": 2, "eps": "small"}),
    (TypeError, "argument 'norm_weight' must be Tensor, not int", {"norm_weight": 1}),
    (ValueError, "eps must be finite and not negative, got -1", {"norm_groups": 2, "eps": -1}),
    (
        ValueError,
        "eps must be finite and not negative, got NaN",
        {"norm_groups": 2, "eps": float("nan")},
    ),
    (
        ValueError,
        "eps must be finite and not negative, got inf",
        {"norm_groups": 2, "eps": float("inf")},
    ),
    (
        RuntimeError,
        "out_channels must be divisible by norm_groups, got out_channels 6 with norm_groups 4",
        {"norm_groups": 4},
    ),
    (RuntimeError, "norm_groups must be positive, got 0", {"norm_groups": 0}),
    (RuntimeError, "norm_groups must be positive, got -2", {"norm_groups": -2}),
    (
        RuntimeError,
        "norm_weight must have shape [6], got [3]",
        {"norm_groups": 2, "norm_weight": B[:3]},
    ),
    (
        RuntimeError,
        "norm_bias must have dtype float32, got float64",
        {"norm_groups": 2, "norm_weight": B, "norm_bias": B.double()},
    ),
    (RuntimeError, "norm_weight must be absent", {"norm_weight": B}),
    (ValueError, "memory must be one of save, got 'less'", {"memory": "less"}),
]


def name_of(value: object) -> str:
    return value if isinstance(value, str) else ""


def raises(function, kind: type, text: str, change: dict) -> None:
    arguments = {"input": X, "weight": W, "bias": B, **change}
    # The class itself, not a subclass: NotImplementedError is a RuntimeError too.
    with pytest.raises(kind, match=re.escape(text)) as raised:
        function(**arguments)
    assert raised.type is kind


@pytest.mark.parametrize(("kind", "text", "change"), CONV_ERRORS, ids=name_of)
def test_conv_errors(kind: type, text: str, change: dict) -> None:
    raises(volup.conv_transpose3d, kind, text, change)
    raises(volup.conv_transpose3d_block, kind, text, change)


@pytest.mark.parametrize(("kind", "text", "change"), BLOCK_ERRORS, ids=name_of)
def test_block_errors(kind: type, text: str, change: dict) -> None:
    raises(volup.conv_transpose3d_block, kind, text, change)


@pytest.mark.parametrize(("kind", "text", "change"), CONV_ERRORS + BLOCK_ERRORS, ids=name_of)
def test_the_errors_are_the_same_where_gradients_are_recorded(
    kind: type, text: str, change: dict
) -> None:
    if "input" in change:
        return
    raises(
        volup.conv_transpose3d_block, kind, text, {"input": X.clone().requires_grad_(), **change}
    )


# PyTorch has no precisions, its sizes wrap, and it would try to allocate what is merely huge.
OWN_ERRORS = [{"precision": "fp8"}, {"stride": 2**62}, {"stride": 2**40}]


@pytest.mark.parametrize(
    ("kind", "change"),
    [(kind, change) for kind, _, change in CONV_ERRORS if change not in OWN_ERRORS],
)
def test_pytorch_raises_the_same_class(kind: type, change: dict) -> None:
    arguments = {"input": X, "weight": W, "bias": B, **change}
    with pytest.raises(kind):
        F.conv_transpose3d(**arguments)


def test_a_single_value_a_group_is_pytorchs_value_error() -> None:
    input, weight = torch.randn(1, 4, 1, 1, 1), torch.randn(4, 6, 1, 1, 1)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        F.group_norm(F.conv_transpose3d(input, weight), 6)
    with pytest.raises(ValueError, match="norm_groups must leave more than 1 value"):
        volup.conv_transpose3d_block(input, weight, norm_groups=6)
