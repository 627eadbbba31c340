"""Without a GPU: the operators' kernels for CUDA, on the CPU's engine and on PyTorch's operators.

The tests of the operators and of the gradients run once more with these kernels in the place of the
CPU's.
"""

# ruff: noqa: F401 (the tests of two other files)

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import test_training
import torch
import torch.nn.functional as F
from samples import B, W, X
from stand_in import CpuPass, cuda_kernels, pretend
from test_operators import (
    test_compiled_code_holds_the_operators,
    test_compiled_layers,
    test_opcheck,
    test_operators_cast_as_autocast_says,
    test_operators_refuse_what_the_functions_refuse,
)
from test_training import (
    NAMES,
    test_a_gradient_of_any_strides,
    test_a_gradient_penalty_is_pytorchs,
    test_an_infinite_gradient_skips_the_step,
    test_any_strides,
    test_gradients_are_slopes,
    test_gradients_are_those_of_float64,
    test_mixed_precision_is_pytorchs,
    test_no_more_is_kept_than_by_pytorchs_modules,
    test_saving_memory_changes_no_bit,
    test_third_gradients,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode

import volup
from volup import _calls, _compose, _cuda, _memory, _native, functional

OPS = torch.ops.volup


@pytest.fixture(autouse=True, params=["passes", "pytorch"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the engine's passes compute; else PyTorch's operators do."""
    obstacle = "no driver" if request.param == "pytorch" else None
    if (
        obstacle
        and "gradients_are_those_of_float64" in request.node.name
        and "float16" in request.node.name
    ):
        pytest.skip("oneDNN's weight gradients of bfloat16 are not always numbers")
    with cuda_kernels(monkeypatch, obstacle):
        yield obstacle is None


@pytest.fixture
def passes(engine: bool) -> type[CpuPass]:
    if not engine:
        pytest.skip("of the engine's passes")
    return CpuPass


# Second gradients are made of other operators, for which sizes of real layers differ in time alone.
@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("-small")])
def test_gradients_of_gradients_are_slopes(name: str) -> None:
    test_training.test_gradients_of_gradients_are_slopes(name)


CONV = ([2, 2, 2], [1, 1, 1], [0, 0, 0], 1, [1, 1, 1])
STEPS = ("silu", 0.01, 3, 1e-5, "leaky_relu", 0.2)
block = partial(volup.conv_transpose3d_block, activation="relu", norm_groups=2)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def train(input: Tensor, *parameters: Tensor, **options: Any) -> tuple[Tensor, ...]:
    output = block(input, *parameters, **options)
    leaves = [t for t in (input, *parameters) if t.requires_grad]
    return torch.autograd.grad(output.square().sum(), leaves)


def test_plans_once_a_kind_of_call(passes: type[CpuPass]) -> None:
    def planned(*tensors: Tensor, **options: Any) -> int:
        before, launched = len(passes.planned), len(passes.launched)
        for _ in range(3):
            train(*tensors, **options)
        assert len(passes.launched) == launched + 6
        return len(passes.planned) - before

    x, w, b = leaf(X), leaf(W), leaf(B)
    assert planned(x, w, b) == 2
    assert planned(x, w, b, stride=(1, 1, 1)) == 0
    assert planned(x, w) == 2
    assert planned(x[:1], w, b) == 2
    assert planned(leaf(X.double()), leaf(W.double()), leaf(B.double())) == 2
    assert planned(leaf(X.to(memory_format=torch.channels_last_3d)), w, b) == 2
    assert planned(x, w, b, eps=1e-3) == 2
    # Other gradients of the same forward pass.
    assert planned(X, w, b) == 1
    assert planned(x, W, B) == 1


def test_only_gradients_that_are_needed_are_planned(passes: type[CpuPass]) -> None:
    for x, w, b in ((leaf(X), W, B), (X, leaf(W), B), (X, W, leaf(B))):
        wanted = tuple(t.requires_grad for t in (x, w, b))
        train(x, w, b)
        assert passes.wanted_of == [(*wanted, False, False)]
        passes.wanted_of.clear()
        volup.conv_transpose3d(x, w, b).sum().backward()
        expected = [(True, *[False] * 4)] * wanted[0] + [(False, True, *[False] * 3)] * wanted[1]
        assert passes.wanted_of == expected
        passes.wanted_of.clear()


def test_gradients_are_in_the_precision_that_was_asked_for(
    passes: type[CpuPass], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = leaf(X), leaf(W)
    for options in ({}, {"memory": "save"}):
        for asked, before, after in (
            ("tf32", "ieee", "ieee"),
            ("ieee", "tf32", "tf32"),
            (None, "tf32", "ieee"),
        ):
            for module in (_compose, _cuda):
                monkeypatch.setattr(module, "flagged_precision", lambda: before)  # noqa: B023
            passes.launched.clear()
            output = block(x, w, precision=asked, **options)
            also = volup.conv_transpose3d(x, w, precision=asked)
            forward = [precision for _, precision in passes.launched]
            monkeypatch.setattr(_compose, "flagged_precision", lambda: after)  # noqa: B023
            first = torch.autograd.grad((output.sum() + also.sum()), (x, w), create_graph=True)
            sum(grad.square().sum() for grad in first).backward()
            backward = [precision for _, precision in passes.launched[len(forward) :]]
            assert set(forward) == {asked or before}
            assert len(backward) > 4
            assert set(backward) == {asked or after}


@pytest.mark.parametrize("channels_last", [False, True])
def test_an_empty_batch_has_gradients_of_zeros(channels_last: bool) -> None:
    x, w, b = (leaf(t) for t in (X[:0], W, B))
    if channels_last:
        x = leaf(X.to(memory_format=torch.channels_last_3d)[:0])
    norm = leaf(B), leaf(B)
    options = {"norm_weight": norm[0], "norm_bias": norm[1]}
    for output in (block(x, w, b, **options), block(x, w, b, memory="save", **options)):
        assert output.shape == (0, 6, 5, 6, 7)
        grads = torch.autograd.grad(output.sum(), (x, w, b, *norm))
        assert grads[0].shape == x.shape
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads[1:])
    grads = torch.autograd.grad(volup.conv_transpose3d(x, w, b).sum(), (x, w, b))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)
    assert not CpuPass.launched


def test_what_lies_elsewhere_is_copied(passes: type[CpuPass]) -> None:
    memory = torch.empty(X.numel() + 1)
    odd = memory[1:].view(X.shape).copy_(X)
    assert odd.data_ptr() % 16
    negative = torch._neg_view(-X)
    assert negative.is_neg()
    expected = train(X, leaf(W), B)[0]
    for input in (odd, negative, X.transpose(2, 4).contiguous().transpose(2, 4)):
        assert torch.equal(train(input, leaf(W), B)[0], expected)
        output = volup.conv_transpose3d(input, leaf(W))
        assert torch.equal(output, volup.conv_transpose3d(X, W))


def test_a_class_that_turns_the_dispatcher_off(passes: type[CpuPass]) -> None:
    class Off(torch.Tensor):
        __torch_dispatch__ = torch._C._disabled_torch_dispatch_impl

    for _ in range(2):
        for x in (X, X[:1]):
            got = OPS.conv_transpose3d(x.as_subclass(Off), W, None, *CONV, None, False)
            assert torch.equal(got, volup.conv_transpose3d(x, W, None, 2, 1))
    assert None not in _calls._kept


def test_what_a_bare_block_saves() -> None:
    rest = (*CONV, None, 0.01, None, 1e-5, None, 0.01, None)
    expected = volup.conv_transpose3d(X, W, B, 2, 1)
    x, w = leaf(X), leaf(W)
    output, *kept = OPS.conv_transpose3d_block_training(x, w, B, None, None, *rest, False)
    torch.testing.assert_close(kept[0], expected)
    assert [t.numel() for t in kept[1:]] == [0, 0]
    torch.testing.assert_close(output, expected)
    theirs = volup.conv_transpose3d(x, w, B, 2, 1)
    for got, grad in zip(
        torch.autograd.grad(output.sin().sum(), (x, w)),
        torch.autograd.grad(theirs.sin().sum(), (x, w)),
        strict=True,
    ):
        torch.testing.assert_close(got, grad, rtol=1e-4, atol=1e-4)


def test_nothing_wanted_is_nothing_done(passes: type[CpuPass]) -> None:
    rest = (*CONV, *STEPS, None)
    _, *kept = OPS.conv_transpose3d_block_training(X, W, B, None, None, *rest, False)
    passes.launched.clear()
    tensors = (kept[0], X, W, B, None, None, *kept)
    gradients = OPS.conv_transpose3d_block_grad(*tensors, *rest, [False] * 5)
    assert [gradient.numel() for gradient in gradients] == [0] * 5
    assert not passes.launched


def test_what_is_not_read_need_not_be_there(passes: type[CpuPass]) -> None:
    x, w = leaf(X), leaf(W)
    for output in (block(x, W), volup.conv_transpose3d(x, W)):
        weight = torch.autograd.grad(output.sum(), x, retain_graph=True)
        assert weight[0].abs().sum() > 0
    freed = leaf(W)
    output = block(X, freed, B)
    freed.untyped_storage().resize_(0)
    output.sum().backward()
    output = block(x, w, B)
    w.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="weight has no memory: its storage was freed"):
        output.sum().backward()


def test_where_kernels_for_a_pass_are_missing(passes: type[CpuPass]) -> None:
    x, w, b = leaf(X), leaf(W), leaf(B)
    expected = train(x, w, b)
    _calls._kept.clear()
    passes.missing.add("backward")
    with pytest.warns(RuntimeWarning, match="so PyTorch does: no such kernel"):
        got = train(x, w, b)
    # A second warning would be an error here.
    train(x, w, b)
    volup.conv_transpose3d(x, w, b).sum().backward()
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    passes.missing.update(("forward", "training"))
    torch.testing.assert_close(train(x, w, b, stride=2), train(x, w, b, stride=2))


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_warns_where_no_engine_is(engine: bool) -> None:
    if engine:
        pytest.skip("of PyTorch's operators")
    _cuda._warned.clear()
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = leaf(X)
    with pytest.warns(RuntimeWarning, match="no driver"):
        compiled(x, W).sum().backward()
    assert x.grad.abs().sum() > 0


def test_operators_say_what_does_not_fit() -> None:
    rest = (*CONV, *STEPS, None)
    _, *kept = OPS.conv_transpose3d_block_training(X, W, B, None, None, *rest, False)
    grad = torch.randn_like(kept[0])
    tensors = (X, W, B, None, None)

    def gradients(grad: Tensor, kept: Sequence[Tensor]) -> None:
        OPS.conv_transpose3d_block_grad(grad, *tensors, *kept, *rest, [True] * 3 + [False] * 2)

    gradients(grad, kept)
    for text, change in (
        ("grad_output must have shape", (grad[:1], kept)),
        ("convolution must have shape", (grad, (kept[0][:, :3], *kept[1:]))),
        (
            r"mean must have shape \[2, 3\], got \[2, 2\]",
            (grad, (kept[0], kept[1][:, 1:], kept[2])),
        ),
        ("rstd must have dtype float32, got float64", (grad, (*kept[:2], kept[2].double()))),
        ("convolution must have dtype", (grad, (kept[0].double(), *kept[1:]))),
    ):
        with pytest.raises(RuntimeError, match=text):
            gradients(*change)


# --- From the function on, with tensors that claim to be on a GPU ---------------------------------


def test_a_call_that_records_is_prepared_once(
    passes: type[CpuPass], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = []

    def counted(*arguments: Any) -> _native.Block:
        blocks.append(arguments)
        return _native.Block(*arguments)

    native = SimpleNamespace(**{**vars(_native), "Block": counted})
    monkeypatch.setattr(functional, "_native", native)

    def prepared(**options: Any) -> int:
        before = len(blocks)
        for _ in range(3):
            w = leaf(W)
            block(pretend(X), w, B, **options).square().sum().backward()
            expected = leaf(W)
            options.pop("memory", None)
            output = F.group_norm(F.relu(F.conv_transpose3d(X, expected, B, **options)), 2)
            output.square().sum().backward()
            torch.testing.assert_close(w.grad, expected.grad, rtol=1e-3, atol=1e-3)
        return len(blocks) - before

    assert prepared() == 1
    assert prepared() == 0
    assert prepared(stride=2) == 1
    kinds = [task for task, _ in passes.planned]
    passes.launched.clear()
    block(pretend(X), leaf(W), B, memory="save").sum().backward()
    tasks = [task for task, _ in passes.launched]
    assert tasks == ["forward", "recompute"]
    assert passes.wanted_of[-1] == (False, True, False, False, False)
    assert kinds.count("training") == 2


def test_a_call_that_is_cast_is_prepared_once(
    passes: type[CpuPass], monkeypatch: pytest.MonkeyPatch
) -> None:
    w, b = leaf(W), leaf(B)
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        first = block(pretend(X), w, b)
        with monkeypatch.context() as patched:
            patched.setattr(_memory, "check", lambda *_: pytest.fail("prepared again"))
            second = block(pretend(X), w, b)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", dtype)
    assert first.dtype == second.dtype == torch.bfloat16
    assert torch.equal(first, second)
    second.sum().backward()
    assert w.grad.dtype == torch.float32


def test_fake_tensors_on_a_gpu_are_traced_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            y = block(x, w, b, 2, norm_weight=b, norm_bias=b, precision="tf32")
            return y + volup.conv_transpose3d(x, w, b, 2)

    with FakeTensorMode():
        x = torch.empty(X.shape, device="cuda:0").to(memory_format=torch.channels_last_3d)
        w = torch.empty(W.shape, device="cuda:0", requires_grad=True)
        b = torch.empty(B.shape, device="cuda:0", requires_grad=True)
        exported = torch.export.export(Model(), (x, w, b), strict=True)
        monkeypatch.setattr(_cuda, "_obstacles", {x.device: None})
        eager = Model()(x, w, b)
    calls = {
        str(node.target).split(".")[1]: node.args
        for node in exported.graph.nodes
        if str(node.target).startswith("volup")
    }
    assert list(calls) == ["conv_transpose3d_block_training", "conv_transpose3d"]
    # Group norm's output is contiguous on CUDA.
    assert calls["conv_transpose3d_block_training"][-2:] == ("tf32", False)
    assert calls["conv_transpose3d"][-2:] == (None, True)
    assert eager.shape == (2, 6, 7, 9, 11)
    assert eager.grad_fn is not None
