"""Calls like one before take a shorter way: to the same bits, errors and gradients."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from samples import B, W, X
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import volup
from volup import _calls, _native

OPS = torch.ops.volup
conv = volup.conv_transpose3d
block = partial(volup.conv_transpose3d_block, activation="silu", norm_groups=3)
save = partial(block, memory="save")
FUNCTIONS = {"conv": conv, "block": block, "save": save}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_kept", {})


@pytest.fixture(params=FUNCTIONS)
def function(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """A function, of which calls with these tensors were made before."""
    made = FUNCTIONS[request.param]
    for grad in (False, True):
        tensors = [t.clone().requires_grad_(grad) for t in (X, W, B)]
        for _ in range(2):
            made(*tensors)
    return made


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


class Spy(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_second_call_prepares_nothing(
    function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise AssertionError("prepared")

    monkeypatch.setattr(_native, "Block", refused)
    x, w, b = leaf(X), leaf(W), leaf(B)
    with torch.no_grad():
        function(x, w, b)
    function(X.clone(), W.clone(), B.clone())
    function(x, w, b)
    with pytest.raises(AssertionError, match="prepared"):
        function(x, w, b, 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_bits_whichever_way(name: str) -> None:
    def results() -> list[Tensor]:
        x, w, b = leaf(X), leaf(W), leaf(B)
        output = FUNCTIONS[name](x, w, b, 2, 1)
        return [output, *torch.autograd.grad(output.sin().sum(), (x, w, b))]

    first, second = results(), results()
    with Spy() as spy:
        watched = results()
    assert any(name.startswith("volup") for name in spy.names)
    with torch.no_grad():
        alone = [FUNCTIONS[name](X, W, B, 2, 1) for _ in range(2)]
    for ways in (second, watched):
        assert all(torch.equal(*pair) for pair in zip(first, ways, strict=True))
    assert torch.equal(*alone)
    torch.testing.assert_close(alone[0], first[0])


@pytest.mark.parametrize("needs", itertools.product((False, True), repeat=3), ids=str)
def test_what_requires_gradients_gets_them(
    function: Callable[..., Tensor], needs: tuple[bool, ...]
) -> None:
    for _ in range(2):
        tensors = [t.clone().requires_grad_(n) for t, n in zip((X, W, B), needs, strict=True)]
        output = function(*tensors)
        assert output.requires_grad == any(needs)
        if any(needs):
            output.sin().sum().backward()
        assert [t.grad is not None for t in tensors] == list(needs)
        everything = [leaf(t) for t in (X, W, B)]
        function(*everything).sin().sum().backward()
        for tensor, other in zip(tensors, everything, strict=True):
            assert tensor.grad is None or torch.equal(tensor.grad, other.grad)


def test_nothing_is_recorded_where_nothing_may_be(function: Callable[..., Tensor]) -> None:
    tensors = [leaf(t) for t in (X, W, B)]
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert not function(*tensors).requires_grad
    assert function(*tensors).requires_grad
    with torch.inference_mode():
        inner = [t.clone() for t in tensors]
        assert function(*inner).is_inference()


def test_modes_see_what_is_called(function: Callable[..., Tensor]) -> None:
    x, w = leaf(X), leaf(W)
    for tensors in ((X, W, B), (x, w, B)):
        with Spy() as spy:
            output = function(*tensors)
        assert any(name.startswith("volup.conv_transpose3d") for name in spy.names)
    with Spy() as spy:
        output.sum().backward()
    assert any(name.endswith("grad.default") for name in spy.names if name.startswith("volup"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(function(X, W, B)) is FakeTensor


def test_traces_hold_the_operators(function: Callable[..., Tensor]) -> None:
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: function(x, W, B))(X)
    assert any("volup" in str(node.target) for node in graph.graph.nodes)


def test_transforms_are_refused(function: Callable[..., Tensor]) -> None:
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(RuntimeError, match=r"cannot be transformed by torch\.func"):
            transform(lambda x: function(x, W, B).sum())(X)


def test_tangents_are_refused(function: Callable[..., Tensor]) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(RuntimeError, match="input has a tangent"):
            function(dual, W, B)


def test_classes_that_dispatch_are_dispatched(function: Callable[..., Tensor]) -> None:
    seen = []

    class Logged(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: Tensor) -> Tensor:
            logged = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            logged.inner = inner
            return logged

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            plain = [a.inner if isinstance(a, Logged) else a for a in args]
            return function(*plain, **(kwargs or {}))

    for _ in range(2):
        got = function(Logged(X), W, B)
    assert any(name.startswith("volup") for name in seen)
    assert torch.equal(got, function(X, W, B))


def test_classes_that_only_have_attributes_are_plain(function: Callable[..., Tensor]) -> None:
    class Tagged(torch.Tensor):
        pass

    got = function(X.as_subclass(Tagged), W, B)
    assert type(got) is Tagged
    assert torch.equal(got.as_subclass(torch.Tensor), function(X, W, B))


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_casts(function: Callable[..., Tensor], grad: bool) -> None:
    tensors = [t.clone().requires_grad_(grad) for t in (X, W, B)]
    expected = function(*(t.bfloat16() for t in tensors))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            got = function(*tensors)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, expected)
    assert function(*tensors).dtype == torch.float32


@pytest.mark.filterwarnings("ignore")
def test_the_compiler_breaks_at_nothing(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = leaf(X)
    torch.testing.assert_close(compiled(x, W, B), function(x, W, B))


def test_gradients_of_gradients(function: Callable[..., Tensor]) -> None:
    def second() -> tuple[Tensor, ...]:
        x, w = leaf(X.double()), leaf(W.double())
        output = function(x, w, B.double())
        first = torch.autograd.grad(output.sin().sum(), (x, w), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))

    once, again = second(), second()
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))
    x, w = leaf(X.double()[:1, :, :2, :2, :2]), leaf(W.double())
    assert torch.autograd.gradgradcheck(
        lambda x, w: function(x, w, B.double()), (x, w), fast_mode=True
    )


def test_saved_tensors_may_come_back_as_others(function: Callable[..., Tensor]) -> None:
    def gradients() -> tuple[Tensor, ...]:
        x, w, b = leaf(X), leaf(W), leaf(B)
        return torch.autograd.grad(function(x, w, b).sin().sum(), (x, w, b))

    def strided(tensor: Tensor) -> Tensor:
        return tensor.detach().transpose(0, -1).clone().transpose(0, -1)

    expected = gradients()
    for unpack in (Tensor.clone, strided):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            got = gradients()
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.nbytes // 2)
    return tensor


@pytest.mark.parametrize(
    ("kind", "text", "change"),
    [
        (TypeError, "argument 'stride' must be int", {"stride": True}),
        (TypeError, "argument 'padding' must be int", {"padding": (0, 0, 0.0)}),
        (TypeError, "argument 'groups' must be int", {"groups": 1.0}),
        (TypeError, "argument 'weight' must be Tensor", {"weight": None}),
        (TypeError, "argument 'bias' must be Tensor", {"bias": [1.0]}),
        (ValueError, "precision must be one of", {"precision": "fp8"}),
        (RuntimeError, "weight must have dtype float32, got float64", {"weight": W.double()}),
        (RuntimeError, "weight must be on the CPU", {"weight": W.to("meta")}),
        (RuntimeError, r"bias must have shape \[6\], got \[1, 6\]", {"bias": B[None]}),
        (RuntimeError, "input must have 4 channels", {"input": X[:, :3]}),
        (RuntimeError, "input must be a strided tensor", {"input": X.to_sparse()}),
        (RuntimeError, "weight has no memory: its storage was freed", {"weight": freed(W)}),
        (RuntimeError, "input has no memory: its storage was freed", {"input": freed(X)}),
        (RuntimeError, "must be smaller than", {"output_padding": 1}),
    ],
)
def test_errors_are_those_of_a_first_call(
    function: Callable[..., Tensor], kind: type, text: str, change: dict[str, Any]
) -> None:
    for grad in (False, True):
        arguments = {"input": leaf(X) if grad else X, "weight": W, "bias": B, **change}
        for _ in range(2):
            with pytest.raises(kind, match=text):
                function(**arguments)


def test_unknown_ways_to_use_memory_are_refused() -> None:
    for _ in range(2):
        block(X, W, B)
        with pytest.raises(ValueError, match="memory must be one of save"):
            block(X, W, B, memory="none")


def test_where_tensors_lie(function: Callable[..., Tensor]) -> None:
    memory = torch.empty(X.numel() + 1)
    views: list[Tensor] = [
        memory[1:].view(X.shape).copy_(X),
        torch.frombuffer(bytearray(b"x" + X.numpy().tobytes()), dtype=X.dtype, offset=1).view_as(X),
        X.to(memory_format=torch.channels_last_3d),
        X.transpose(2, 4).contiguous().transpose(2, 4),
        X.repeat_interleave(2, 1)[:, ::2],
        torch._neg_view(-X),
        X[:1].expand(2, -1, -1, -1, -1),
    ]
    for view, grad in itertools.product(views, (False, True)):
        weight = W.clone().requires_grad_(grad)
        for _ in range(2):
            got = function(view, weight, B)
            expected = function(view.clone().contiguous(), weight, B)
            torch.testing.assert_close(got, expected)


def test_without_a_batch(function: Callable[..., Tensor]) -> None:
    for _ in range(2):
        one, batch, w = leaf(X[0]), leaf(X[:1]), leaf(W)
        output, batched = function(one, w, B), function(batch, w, B)
        assert torch.equal(output, batched[0])
        got, expected = (
            torch.autograd.grad(o.sin().sum(), i) for o, i in ((output, one), (batched, batch))
        )
        assert torch.equal(got[0], expected[0][0])


def test_parameters_change(function: Callable[..., Tensor]) -> None:
    w = torch.nn.Parameter(W.clone())
    with torch.no_grad():
        for _ in range(3):
            w.mul_(1.5)
            assert torch.equal(function(X, w, B), function(X, w.detach().clone(), B))


def test_no_more_is_kept_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_MOST_KEPT", 5)
    for stride in range(1, 8):
        conv(X, W, B, stride)
        conv(leaf(X), W, B, stride)
    assert len(_calls._kept) == 5


def test_what_a_description_tells_apart() -> None:
    last = X.to(memory_format=torch.channels_last_3d)
    different = [X, X[:1], X[0], X.double(), X.half(), X.bfloat16(), X.transpose(2, 4), last, B]
    described = [_native.describe((tensor,)) for tensor in different]
    assert None not in described
    assert len(set(described)) == len(different)
    assert _native.describe((X, None)) != _native.describe((None, X))
    assert _native.describe((X.clone(),)) == _native.describe((torch.nn.Parameter(X),))
    for strange in (3, X.to("meta"), X.to_sparse(), torch._neg_view(X), X[None], X.numpy()):
        assert _native.describe((strange,)) is None
    with FakeTensorMode() as mode:
        assert _native.describe((mode.from_tensor(X),)) is None


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="these tests are all of it"
)
def test_a_pytorch_without_dlpacks_table() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = (
        "import sys, torch, pytest; del torch.Tensor.__dlpack_c_exchange_api__;"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {__file__!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
