"""The two functions: arguments, norm parameters, autocast, gradients, torch.compile."""

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from samples import B, W, X, close, close_to_rounded
from torch import Tensor

import volup


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"stride": [2]},
        {"stride": (2,)},
        {"stride": [1, 2, 3], "padding": (0, 1, 2)},
        {"stride": torch.Size([2, 2, 2]), "output_padding": 1},
        {"stride": np.int64(2)},
        {"stride": (np.int64(2),) * 3},
        {"stride": torch.tensor(2)},
        {"stride": [torch.tensor(2)] * 3},
        {"dilation": (1, 2, 1)},
    ],
    ids=str,
)
def test_takes_what_pytorch_takes(options: dict) -> None:
    input, weight, bias = X, W, B
    theirs = F.conv_transpose3d(input, weight, bias, **options)
    close(volup.conv_transpose3d(input, weight, bias, **options), theirs)


def test_has_the_parameters_of_pytorch_in_their_order() -> None:
    input, weight = X, W
    weight, bias = weight[:, :3], torch.randn(6)
    arguments = (input, weight, bias, 2, 1, 1, 2, 1)
    theirs = F.conv_transpose3d(*arguments)
    close(volup.conv_transpose3d(*arguments), theirs)
    close(volup.conv_transpose3d_block(*arguments), theirs)


@pytest.mark.parametrize("name", ["ieee", "tf32", None])
def test_precision_changes_nothing_on_the_cpu(name: str | None) -> None:
    input, weight, bias = X, W, B
    got = volup.conv_transpose3d(input, weight, bias, precision=name)
    assert torch.equal(got, volup.conv_transpose3d(input, weight, bias))


def test_weight_and_bias_of_the_norm_may_come_alone() -> None:
    y = F.conv_transpose3d(X, W)
    for options in ({"norm_weight": B}, {"norm_bias": B}, {}, {"norm_weight": B, "norm_bias": B}):
        got = volup.conv_transpose3d_block(X, W, norm_groups=3, **options)
        theirs = F.group_norm(y, 3, options.get("norm_weight"), options.get("norm_bias"))
        close(got, theirs)


def test_without_a_batch_the_norm_is_that_of_a_batch_of_one() -> None:
    got = volup.conv_transpose3d_block(X[0], W, norm_groups=3, activation="silu")
    assert torch.equal(
        got, volup.conv_transpose3d_block(X[:1], W, norm_groups=3, activation="silu")[0]
    )


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_pytorch_does(to: torch.dtype) -> None:
    with torch.autocast("cpu", to):
        got = volup.conv_transpose3d(X, W, B)
        assert got.dtype == F.conv_transpose3d(X, W, B).dtype == to
        close_to_rounded(got, to, X, W, B)
        assert volup.conv_transpose3d_block(X, W, B, norm_groups=2).dtype == to
        double = volup.conv_transpose3d(X.double(), W.double())
        assert double.dtype == F.conv_transpose3d(X.double(), W.double()).dtype == torch.float64


def test_a_call_without_gradients_records_nothing() -> None:
    weight = W.clone().requires_grad_()
    with torch.no_grad():
        without = volup.conv_transpose3d_block(X, weight, B, norm_groups=2)
    with torch.inference_mode():
        inference = volup.conv_transpose3d_block(X, weight, B, norm_groups=2)
    assert not without.requires_grad
    assert torch.equal(without, inference)


def test_no_tangents() -> None:
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="input has a tangent"):
        volup.conv_transpose3d(forward_ad.make_dual(X, X), W)


@pytest.mark.filterwarnings("ignore")
def test_traces_hold_the_operator() -> None:
    traced = torch.jit.trace(lambda x: volup.conv_transpose3d(x, W), (X,))
    assert "volup::conv_transpose3d" in str(traced.graph)
    close(traced(2 * X), F.conv_transpose3d(2 * X, W))


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_calls_it() -> None:
    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        return volup.conv_transpose3d(x * 2, W, B) + 1

    with torch.no_grad():
        close(compiled(X), F.conv_transpose3d(X * 2, W, B) + 1)
