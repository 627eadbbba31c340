"""Gradients: against finite differences, float64 and PyTorch; what they compute and keep."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import reference
import reference_gradients
import torch
import torch.nn.functional as F
from samples import B, W, X
from test_conformance import CASES, DTYPES, run, tensors_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import volup
from volup import _cpu

# An empty batch has no gradient to compare.
NAMES = [name for name, case in CASES.items() if case["batch"] != 0]


def leaves(name: str, dtype: torch.dtype) -> tuple[dict, Tensor, dict[str, Tensor]]:
    """A case's block, input and parameters, all of which require grad."""
    case = CASES[name]
    input, parameters = tensors_of(case, dtype)
    given = {key: t.requires_grad_() for key, t in parameters.items() if t is not None}
    return case["block"], input.requires_grad_(), given


def call(function: Callable[..., Tensor], spec: dict, names: list[str]) -> Callable[..., Tensor]:
    """The block as a function of its tensors alone."""

    def of_tensors(input: Tensor, *tensors: Tensor) -> Tensor:
        names_all = ("weight", "bias", "norm_weight", "norm_bias")
        given = dict(zip(names, tensors, strict=True))
        return function(input, {name: given.get(name) for name in names_all}, spec)

    return of_tensors


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_slopes(name: str) -> None:
    spec, input, given = leaves(name, torch.float64)
    block = call(run, spec, list(given))
    # A group of two is normalized to plus and minus one, but for eps.
    options = {"atol": 1e-3} if name == "gn-two-values" else {}
    assert torch.autograd.gradcheck(block, (input, *given.values()), fast_mode=True, **options)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_gradients_are_slopes(name: str) -> None:
    spec, input, given = leaves(name, torch.float64)
    block = call(run, spec, list(given))
    options = {"atol": 1e-3} if name in ("gn-two-values", "gn-one-value") else {}
    assert torch.autograd.gradgradcheck(block, (input, *given.values()), fast_mode=True, **options)


KEYS = ("weight", "bias", "norm_weight", "norm_bias")
OPTIONS = (
    *("stride", "padding", "output_padding", "groups", "dilation"),
    *("activation", "norm_groups", "eps", "post_activation"),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    spec, input, given = leaves(name, dtype)
    parameters = {key: given.get(key) for key in KEYS}
    output = run(input, parameters, spec)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)
    got = torch.autograd.grad(output, (input, *given.values()), grad)
    exact = reference_gradients.expected(input, parameters, spec, grad)
    for key, gradient in zip(("input", *given), got, strict=True):
        assert gradient.dtype == dtype
        reference.assert_within(gradient, *exact[key])


@pytest.mark.parametrize(
    "name", ["everything", "last-block", "gn-post", "two-activations", "unbatched-block", "k-s"]
)
def test_saving_memory_changes_no_bit(name: str) -> None:
    spec, input, given = leaves(name, torch.float32)

    def gradients(memory: str | None) -> tuple[Tensor, ...]:
        options = {key: spec[key] for key in OPTIONS}
        output = volup.conv_transpose3d_block(input, **given, **options, memory=memory)
        return torch.autograd.grad(output.sin().sum(), (input, *given.values()))

    for ours, saving in zip(gradients(None), gradients("save"), strict=True):
        assert torch.equal(ours, saving)


IN_PIECES = ("everything", "last-block", "gn-post", "gn-only-post", "two-activations", "relu")


def by_pieces(
    name: str, batch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict, dict[str, Tensor], Tensor]:
    """A case of so many samples, computed again in pieces of them: block, leaves, output."""
    monkeypatch.setattr(_cpu, "LARGE", 0)
    case = CASES[name] | {"batch": batch}
    input, parameters = tensors_of(case, dtype)
    given = {"input": input, **{key: t for key, t in parameters.items() if t is not None}}
    given = {key: t.requires_grad_() for key, t in given.items()}
    options = {key: case["block"][key] for key in OPTIONS}
    output = volup.conv_transpose3d_block(**given, **options, memory="save")
    return case["block"], given, output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "batch"), zip(IN_PIECES, (2, 3, 4, 7, 9, 8), strict=True))
def test_gradients_of_pieces_are_those_of_float64(
    name: str, batch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, given, output = by_pieces(name, batch, dtype, monkeypatch)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)
    first, again = (
        torch.autograd.grad(output, list(given.values()), grad, retain_graph=True) for _ in range(2)
    )
    parameters = {key: given.get(key) for key in KEYS}
    exact = reference_gradients.expected(given["input"], parameters, spec, grad)
    for key, gradient, same in zip(given, first, again, strict=True):
        assert gradient.dtype == dtype
        assert gradient.stride() == given[key].stride()
        assert torch.equal(gradient, same)
        reference.assert_within(gradient, *exact[key])


@pytest.mark.parametrize("batch", [2, 5, 8])
def test_one_piece_is_computed_again_at_a_time(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, given, output = by_pieces("last-block", batch, torch.float32, monkeypatch)
    honest, made = _cpu._for_training, []

    def watched(*arguments: Any) -> tuple[Tensor, ...]:
        assert not any(piece() is not None for piece, _ in made)
        kept = honest(*arguments)
        made.append((weakref.ref(kept[0]), kept[0].shape[0]))
        return kept

    monkeypatch.setattr(_cpu, "_for_training", watched)
    output.sum().backward()
    assert all(samples <= max(1, batch // 4) for _, samples in made)
    assert sum(samples for _, samples in made) == batch
    assert given["input"].grad.shape == given["input"].shape


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def block(input: Tensor, weight: Tensor) -> Tensor:
    bias = B.to(weight.dtype)
    options: dict[str, Any] = {"stride": 2, "activation": "silu", "norm_groups": 3}
    return volup.conv_transpose3d_block(input, weight, bias, **options)


def block_by_pytorch(input: Tensor, weight: Tensor) -> Tensor:
    return F.group_norm(F.silu(F.conv_transpose3d(input, weight, B.to(weight.dtype), 2)), 3)


def assert_same_gradients(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *tensors: Tensor
) -> None:
    for got, expected in zip(
        torch.autograd.grad(ours(*tensors).sin().sum(), tensors),
        torch.autograd.grad(theirs(*tensors).sin().sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[0],
        lambda x: x.to(memory_format=torch.channels_last_3d),
        lambda x: x.transpose(2, 4),
        lambda x: x[:1].expand(2, -1, -1, -1, -1),
    ],
)
def test_any_strides(view: Callable[[Tensor], Tensor]) -> None:
    def theirs(input: Tensor, weight: Tensor) -> Tensor:
        batch = view(input) if view(input).dim() == 5 else view(input)[None]
        return block_by_pytorch(batch, weight).reshape(block(view(input), weight).shape)

    assert_same_gradients(lambda x, w: block(view(x), w), theirs, leaf(X), leaf(W))


def test_a_gradient_of_any_strides() -> None:
    x, w = leaf(X), leaf(W)
    output, theirs = block(x, w), block_by_pytorch(x, w)
    for grad in (
        torch.ones(()).expand(output.shape),
        torch.randn_like(output).to(memory_format=torch.channels_last_3d),
        torch.randn(output.transpose(2, 4).shape).transpose(2, 4),
    ):
        got = torch.autograd.grad(output, (x, w), grad, retain_graph=True)
        expected = torch.autograd.grad(theirs, (x, w), grad, retain_graph=True)
        for ours, other in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-4)


class Calls(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.arguments: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        self.arguments.append(args)
        return function(*args, **(kwargs or {}))


def test_only_gradients_that_are_needed_are_computed() -> None:
    for x, w, wanted in ((leaf(X), W, "input"), (X, leaf(W), "weight")):
        output = volup.conv_transpose3d(x, w, B)
        with Calls() as calls:
            output.sum().backward()
        ours = [name for name in calls.names if name.startswith("volup")]
        assert ours == [f"volup.conv_transpose3d_{wanted}_grad.default"]
        output = block(x, w)
        with Calls() as calls:
            output.sum().backward()
        at = calls.names.index("volup.conv_transpose3d_block_grad.default")
        assert calls.arguments[at][-1] == [wanted == "input", wanted == "weight", *[False] * 3]


def test_no_convolution_of_pytorchs_is_called() -> None:
    x, w = leaf(X), leaf(W)
    with Calls() as calls:
        first = torch.autograd.grad(block(x, w).sum(), (x, w), create_graph=True)
        sum(grad.square().sum() for grad in first).backward()
        volup.conv_transpose3d(x, w).sum().backward()
    assert any(name.startswith("volup") for name in calls.names)
    assert not [name for name in calls.names if "aten.conv" in name or "aten.mkldnn" in name]


def test_a_gradient_penalty_is_pytorchs() -> None:
    def penalty(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def of_tensors(input: Tensor, weight: Tensor) -> Tensor:
            output = layer(input, weight)
            (slope,) = torch.autograd.grad(output.sin().sum(), input, create_graph=True)
            return (slope.flatten(1).norm(dim=1) - 1).square().sum()

        return of_tensors

    tensors = leaf(X.double()), leaf(W.double())
    assert_same_gradients(penalty(block), penalty(block_by_pytorch), *tensors)
    conv = volup.conv_transpose3d, F.conv_transpose3d
    assert_same_gradients(penalty(conv[0]), penalty(conv[1]), *tensors)


def test_what_tensors_depend_on_is_no_part_of_a_second_gradient() -> None:
    def of(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def loss(input: Tensor, weight: Tensor) -> Tensor:
            # The input depends on the weight.
            input = input * weight.mean()
            first = torch.autograd.grad(layer(input, weight).sin().sum(), weight, create_graph=True)
            return first[0].square().sum()

        return loss

    assert_same_gradients(of(block), of(block_by_pytorch), leaf(X.double()), leaf(W.double()))


def test_third_gradients() -> None:
    def third(layer: Callable[..., Tensor]) -> Tensor:
        x = leaf(X[:1, :, :2, :2, :2].double())
        grad = layer(x).sin().sum()
        for _ in range(3):
            (slope,) = torch.autograd.grad(grad, x, create_graph=True)
            grad = slope.square().sum()
        return slope

    w, b = W.double(), B.double()
    got = third(lambda x: volup.conv_transpose3d_block(x, w, b, activation="tanh", norm_groups=2))
    theirs = third(lambda x: F.group_norm(torch.tanh(F.conv_transpose3d(x, w, b)), 2))
    torch.testing.assert_close(got, theirs)


@contextmanager
def saved() -> Iterator[dict[int, int]]:
    """The bytes of each storage that is kept for gradients, by its address; no parameters."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


@pytest.mark.parametrize("activation", [torch.nn.ReLU, torch.nn.SiLU, torch.nn.GELU])
def test_no_more_is_kept_than_by_pytorchs_modules(activation: type) -> None:
    modules = torch.nn.Sequential(
        torch.nn.ConvTranspose3d(4, 6, 2, 2), activation(), torch.nn.GroupNorm(3, 6)
    )
    with saved() as theirs:
        output = modules(X)
    volup.optimize(modules)
    with saved() as ours:
        modules(X)
    assert sum(ours.values()) <= sum(theirs.values())
    with saved() as least:
        volup.conv_transpose3d_block(
            X,
            modules[0].weight,
            modules[0].bias,
            2,
            activation="relu",
            norm_groups=3,
            memory="save",
        )
    assert sum(least.values()) <= sum(ours.values()) - output.nbytes


def test_an_input_is_not_kept_for_the_gradient_of_itself() -> None:
    x = leaf(X)
    with saved() as kept:
        volup.conv_transpose3d(x, W)
    assert x.data_ptr() not in kept


def test_accumulated_gradients_do_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()

    def gradients(threads: int) -> tuple[Tensor, ...]:
        torch.set_num_threads(threads)
        x, w = leaf(torch.ones(2, 4, 9, 10, 11) * X.mean()), leaf(W)
        return torch.autograd.grad(volup.conv_transpose3d(x, w, B, 2).sin().sum(), (x, w))

    try:
        one, two = gradients(1), gradients(2)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("norm_groups", [None, 3])
def test_mixed_precision_is_pytorchs(norm_groups: int | None) -> None:
    def step(ours: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.ConvTranspose3d(4, 6, 3, 2), torch.nn.ReLU())
        if norm_groups:
            model.append(torch.nn.GroupNorm(norm_groups, 6))
        if ours:
            volup.optimize(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(X)
            loss = output.float().square().mean()
        assert output.dtype == torch.bfloat16 or not ours
        scaler.scale(loss).backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        return [p.detach() for p in model.parameters()]

    for got, expected in zip(step(True), step(False), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_an_infinite_gradient_skips_the_step() -> None:
    layer = volup.nn.ConvTranspose3d(4, 6, 2)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(layer(X).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() == 512.0
