"""On a GPU: gradients of every order against float64, and how training behaves there."""

import importlib.util
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reference
import reference_gradients
import torch
import torch.nn.functional as F
from samples import B, W, X
from test_conformance import CASES
from test_cuda import FORMATS, KINDS, TF32, at_once, example, flags, on_gpu, run  # noqa: F401
from test_operators import NAMES as OPERATORS
from test_operators import OPS, arguments
from test_training import KEYS, NAMES, Calls, call
from torch import Tensor
from torch.library import opcheck
from torch.utils._triton import has_triton

import volup
from volup import _calls, _compose, _cuda

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")

# Unit roundoff of the two tf32 numbers that a float32 gradient is multiplied as, unless two fp16
# are fine enough for it.
IEEE = 2.0**-21

BLOCK = {"activation": "relu", "norm_groups": 8, "post_activation": "silu"}
block = partial(volup.conv_transpose3d_block, **BLOCK)
ieee = partial(block, precision="ieee")


def by_pytorch(input: Tensor, weight: Tensor, bias: Tensor | None, *conv: int) -> Tensor:
    return F.silu(F.group_norm(F.relu(F.conv_transpose3d(input, weight, bias, *conv)), 8))


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def leaves(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    return [leaf(tensor) for tensor in example(dtype, seed)]


def gradients(function: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> list[Tensor]:
    output = function(*tensors, **options)
    generator = torch.Generator("cuda").manual_seed(1)
    grad = torch.randn(output.shape, generator=generator, device="cuda").to(output.dtype)
    return list(torch.autograd.grad(output, [t for t in tensors if t.requires_grad], grad))


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)


# --- Values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_float64(name: str, kind: str) -> None:
    dtype, precision = KINDS[kind]
    spec = CASES[name]["block"]
    given, parameters = on_gpu(CASES[name], dtype)
    r = {"tf32": TF32, "ieee": IEEE}[precision] if dtype == torch.float32 else 0.0
    exact = None
    for memory_format in FORMATS.values():
        batch = given if given.dim() == 5 else given[None]
        input = leaf(batch.contiguous(memory_format=memory_format).reshape(given.shape))
        tensors = {"input": input}
        tensors |= {key: leaf(t) for key, t in parameters.items() if t is not None}
        results = []
        for _ in range(2):
            output = run(input, {key: tensors.get(key) for key in KEYS}, spec, precision)
            generator = torch.Generator("cuda").manual_seed(1)
            grad = torch.randn(output.shape, generator=generator, device="cuda").to(dtype)
            results.append(torch.autograd.grad(output, list(tensors.values()), grad))
        if exact is None:
            exact = reference_gradients.expected(given, parameters, spec, grad, r)
        for key, got, again in zip(tensors, *results, strict=True):
            assert got.dtype == dtype
            reference.assert_within(got, *exact[key])
            assert torch.equal(got, again)


@pytest.mark.parametrize("factor", [1e-12, 1e-30, 1e20, torch.inf])
@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
def test_gradients_of_any_magnitudes(memory_format: torch.memory_format, factor: float) -> None:
    """Gradients of a layer that is large enough to be multiplied as two fp16, some of another size.

    What an infinity reaches is one or NaN, as by the definition; the rest is as without it.
    """
    spec = {key: 1 for key in ("stride", "groups", "dilation")}
    spec |= {"padding": 1, "output_padding": 0, "eps": 1e-5}
    spec |= dict.fromkeys(("activation", "norm_groups", "post_activation"))
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = ((8, 64, 8, 32, 32), (64, 64, 3, 3, 3), (8, 64, 8, 32, 32))
    x, w, dz = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    dz[:, :, 4:] *= factor if factor < 1 else 1
    if factor > 1:
        dz[3, 5, 2, 7, 9] = factor
    parameters = {key: w if key == "weight" else None for key in KEYS}
    tensors = {"input": leaf(x.contiguous(memory_format=memory_format)), "weight": leaf(w)}
    output = run(tensors["input"], parameters | {"weight": tensors["weight"]}, spec, "ieee")
    grad = dz.contiguous(memory_format=memory_format)
    got = torch.autograd.grad(output, list(tensors.values()), grad)
    exact = reference_gradients.expected(x, parameters, spec, dz, IEEE)
    for key, gradient in zip(tensors, got, strict=True):
        value, bound = exact[key]
        if key == "weight" and factor == 1e20 and memory_format == torch.channels_last_3d:
            # Four neighbouring channels are scaled alike, which leaves nothing of three of them.
            kept = [channel for channel in range(64) if channel not in (4, 6, 7)]
            gradient, value, bound = (t[:, kept] for t in (gradient, value, bound))
        finite = value.isfinite()
        assert torch.equal(gradient.isfinite(), finite)
        reference.assert_within(gradient[finite], value[finite], bound[finite])


def slopes(name: str, check: Callable[..., bool], **options: Any) -> None:
    spec = CASES[name]["block"]
    given, parameters = on_gpu(CASES[name], torch.float64)
    tensors = {key: leaf(t) for key, t in parameters.items() if t is not None}
    function = call(run, spec, list(tensors))
    assert check(function, (leaf(given), *tensors.values()), fast_mode=True, **options)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_slopes(name: str) -> None:
    # A group of two is normalized to plus and minus one, but for eps.
    options = {"atol": 1e-3} if name == "gn-two-values" else {}
    slopes(name, torch.autograd.gradcheck, **options)


# Each stride, each activation, each parameter at least once, and everything together.
@pytest.mark.parametrize(
    "name",
    [
        *("k3", "bias", "s2", "s3", "s-asymmetric", "s-over-k", "k-s", "p1", "p-crops-strided"),
        *("op1", "op-up-to-dilation", "d2", "s-d-mixed", "g2", "g-depthwise", "g-s2-op1"),
        *("unbatched-block", "last-s2", "last-groups", "last-block", "everything"),
        *("relu", "leaky-relu-steep", "silu", "gelu", "gelu-tanh", "hardswish", "sigmoid", "tanh"),
        *("two-activations", "gn-1", "gn-cout", "gn-plain", "gn-post", "gn-conv-groups", "gn-odd"),
    ],
)
def test_gradients_of_gradients_are_slopes(name: str) -> None:
    slopes(name, torch.autograd.gradgradcheck)


def test_a_gradient_of_a_gradient_calls_no_convolution_of_pytorchs() -> None:
    x, w, b = leaves()
    block(x, w, b).sum().backward()
    with Calls() as calls:
        for output in (block(x, w, b), volup.conv_transpose3d(x, w, b)):
            first = torch.autograd.grad(output.sin().sum(), (x, w), create_graph=True)
            sum(grad.square().sum() for grad in first).backward()
    assert any(name.startswith("volup") for name in calls.names)
    assert not [name for name in calls.names if "aten.conv" in name or "cudnn" in name]


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_special_values_reach_what_they_should(kind: str, special: float) -> None:
    dtype, precision = KINDS[kind]
    x, w, b = (leaf(t.abs() + 0.25) for t in example(dtype))
    output = volup.conv_transpose3d(x, w, b, 2, 1, precision=precision)
    grad = torch.ones_like(output)
    grad[1, 2, 3, 4, 5] = special
    got = torch.autograd.grad(output, (x, w, b), grad)
    exact = [leaf(t.detach().double().cpu()) for t in (x, w, b)]
    theirs = F.conv_transpose3d(*exact, 2, 1)
    for ours, expected in zip(
        got, torch.autograd.grad(theirs, exact, grad.double().cpu()), strict=True
    ):
        assert torch.equal(ours.isfinite().cpu(), expected.isfinite())
        assert torch.equal(ours.isnan().cpu(), expected.isnan())


def test_a_nan_stays_in_its_sample() -> None:
    x, w, b = leaves()
    output = block(x, w, b)
    grad = torch.ones_like(output)
    grad[1, 0, 0, 0, 0] = float("nan")
    of_input, of_weight, of_bias = torch.autograd.grad(output, (x, w, b), grad)
    assert of_input[0].isfinite().all()
    assert of_input[1].isnan().any()
    # The group's six channels, and no others.
    assert of_weight.isnan().any(0).flatten(1).any(1).nonzero().flatten().tolist() == [*range(6)]
    assert of_bias.isnan().nonzero().flatten().tolist() == [*range(6)]


@pytest.mark.parametrize("channels_last", FORMATS)
def test_more_elements_than_32_bits_count(channels_last: bool) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("less than 30 GB of free memory")
    generator = torch.Generator("cuda").manual_seed(0)
    normal = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    input = normal(1, 4, 163, 163, 163).contiguous(memory_format=FORMATS[channels_last])
    weight = normal(4, 64, 2, 2, 2)
    output = volup.conv_transpose3d(input.requires_grad_(), weight, None, 2)
    assert output.numel() > 2**31
    grad = torch.randn_like(output.detach())
    (got,) = torch.autograd.grad(output, input, grad)
    # The last plane depends on the last two of the output alone.
    spec = {"stride": 2, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    spec |= {"activation": None, "norm_groups": None, "post_activation": None, "eps": 0.0}
    parameters = {"weight": weight, "bias": None}
    last = reference_gradients.expected(input[:, :, -1:], parameters, spec, grad[:, :, -2:])
    reference.assert_within(got[:, :, -1:], *last["input"])
    del output, grad, got
    torch.cuda.empty_cache()


# --- What PyTorch sees ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("channels_last", FORMATS)
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, channels_last: bool) -> None:
    input = X.cuda().contiguous(memory_format=FORMATS[channels_last])
    opcheck(getattr(OPS, name).default, arguments(name, leaf(input), leaf(W.cuda())))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("channels_last", FORMATS)
@pytest.mark.parametrize(
    ("backend", "memory"), [("aot_eager", None), ("aot_eager", "save"), ("inductor", None)]
)
def test_compiled_code_trains(backend: str, memory: str | None, channels_last: bool) -> None:
    if backend == "inductor" and not (has_triton() and any(map(shutil.which, ("cc", "gcc")))):
        pytest.skip("no Triton, or no C compiler for it")
    torch._dynamo.reset()
    x, w, b = leaves()
    x = leaf(x.detach().contiguous(memory_format=FORMATS[channels_last]))

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = block(x * 2, w, b, 2, precision="ieee", memory=memory)
        return volup.conv_transpose3d(y, w.transpose(0, 1), None, precision="ieee") + 1

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for ours, theirs in zip(
        gradients(compiled, x, w, b), gradients(function, x, w, b), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_mixed_precision_is_pytorchs(norm: bool, to: torch.dtype) -> None:
    x = example()[0]

    def step(ours: bool) -> tuple[list[Tensor], float]:
        torch.manual_seed(0)
        layers = [torch.nn.ConvTranspose3d(32, 16, 3, 2), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers, *[torch.nn.GroupNorm(4, 16)] * norm).cuda()
        if ours:
            assert volup.optimize(model).replaced
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for _ in range(3):
            with torch.autocast("cuda", to):
                output = model(x)
                loss = output.float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in model.parameters()], scaler.get_scale()

    (ours, scale), (theirs, expected) = step(True), step(False)
    assert scale == expected
    for got, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, parameter, rtol=2e-2, atol=2e-2)


def test_an_infinite_gradient_skips_the_step() -> None:
    layer = volup.nn.ConvTranspose3dBlock(32, 16, 2, norm_groups=4, device="cuda")
    before = layer.conv.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with torch.autocast("cuda", torch.float16):
        loss = layer(example()[0]).float().sum() * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.conv.weight, before)
    assert scaler.get_scale() == 512.0


def test_only_gradients_that_are_needed_are_computed() -> None:
    tensors = example()
    everything = gradients(ieee, *leaves())
    for i in range(3):
        given = [leaf(t) if i == j else t for j, t in enumerate(tensors)]
        (got,) = gradients(ieee, *given)
        torch.testing.assert_close(got, everything[i], rtol=1e-4, atol=1e-3)
        output = block(*given)
        with Calls() as called:
            output.sum().backward()
        at = called.names.index("volup.conv_transpose3d_block_grad.default")
        assert called.arguments[at][-1] == [i == j for j in range(5)]
        assert not [name for name in called.names if "recomputed" in name]


@pytest.mark.parametrize("kind", KINDS)
def test_saving_memory_changes_no_bit(kind: str) -> None:
    dtype, precision = KINDS[kind]
    tensors = leaves(dtype)
    kept = gradients(block, *tensors, stride=2, precision=precision)
    saving = gradients(block, *tensors, stride=2, precision=precision, memory="save")
    assert_same(saving, kept)


def test_saving_memory_saves_it() -> None:
    x, w, b = leaves()
    x = leaf(x.detach().repeat(1, 1, 4, 4, 4))

    def held(memory: str | None) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        output = block(x, w, b, 2, memory=memory)
        beside = torch.cuda.memory_allocated() - before - output.nbytes
        assert output.grad_fn is not None
        return beside

    # What is left of a block of memory counts as taken, if it is less than a megabyte.
    left = 2**20 + 2**16
    output_bytes = block(x, w, b, 2).nbytes
    assert output_bytes > 4 * left
    assert held("save") < left
    assert held(None) < output_bytes + 2 * left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_that_saves_memory_takes_less(dtype: torch.dtype) -> None:
    # Outputs of 32 MB a sample, so that the backward pass takes quarters of the batch.
    samples, size = 4, 32 if dtype == torch.float32 else 40
    generator = torch.Generator("cuda").manual_seed(0)
    normal = partial(torch.randn, generator=generator, device="cuda", dtype=dtype)
    x = normal(samples, 16, size, size, size).requires_grad_()
    parameters = {"weight": normal(16, 32, 4, 4, 4) / 32, "bias": normal(32)}
    parameters |= {"norm_weight": normal(32), "norm_bias": normal(32)}
    given = (x, *(leaf(parameter) for parameter in parameters.values()))
    options = {"stride": 2, "padding": 1, "activation": "silu", "norm_groups": 4}
    grad = normal(samples, 32, *[2 * size] * 3)
    assert grad.nbytes > 2**26

    def step(memory: str | None) -> tuple[Tensor, ...]:
        x, weight, bias, norm_weight, norm_bias = given
        norm = {"norm_weight": norm_weight, "norm_bias": norm_bias}
        output = volup.conv_transpose3d_block(
            x, weight, bias, **options, **norm, precision="ieee", memory=memory
        )
        return torch.autograd.grad(output, given, grad)

    def peak(memory: str | None) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(memory)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    first, again = step("save"), step("save")
    assert_same(first, again)
    spec = {"output_padding": 0, "groups": 1, "dilation": 1, "post_activation": None, "eps": 1e-5}
    r = IEEE if dtype == torch.float32 else 0.0
    exact = reference_gradients.expected(x, parameters, spec | options, grad, r)
    for name, got in zip(("input", *parameters), first, strict=True):
        reference.assert_within(got, *exact[name])
    del first, again, exact
    assert peak("save") < peak(None) - grad.nbytes // 2


def test_gradients_are_in_the_precision_that_was_asked_for(flags: None) -> None:  # noqa: F811
    x, w, b = leaves()
    for function in (block, volup.conv_transpose3d):
        exact, rounded = (gradients(function, x, w, b, precision=p) for p in ("ieee", "tf32"))
        assert not torch.equal(exact[0], rounded[0])
        for name, expected in (("ieee", exact), ("tf32", rounded)):
            _compose._set_precision(name)
            assert_same(gradients(function, x, w, b), expected)
            # Of a forward pass that was told, whatever the flags say.
            other = {"ieee": "tf32", "tf32": "ieee"}[name]
            told = gradients(function, x, w, b, precision=other)
            assert_same(told, exact if other == "ieee" else rounded)


# --- Memory and streams ---------------------------------------------------------------------------


def test_a_gradient_of_any_strides_and_address() -> None:
    x, w, b = leaves()
    output = block(x, w, b)
    plain = torch.randn_like(output)
    expected = torch.autograd.grad(output, (x, w, b), plain, retain_graph=True)
    odd = torch.empty(plain.numel() + 1, device="cuda")[1:].view(plain.shape).copy_(plain)
    assert odd.data_ptr() % 16
    last = plain.contiguous(memory_format=torch.channels_last_3d)
    for grad in (odd, last, plain.transpose(2, 4).contiguous().transpose(2, 4)):
        assert_same(torch.autograd.grad(output, (x, w, b), grad, retain_graph=True), expected)
    got = torch.autograd.grad(output, (x, w, b), torch.ones((), device="cuda").expand(output.shape))
    again = torch.autograd.grad(block(x, w, b), (x, w, b), torch.ones_like(output))
    assert_same(got, again)


def test_an_input_of_any_strides_and_address() -> None:
    x, w, b = leaves()
    expected = gradients(block, x.detach(), w, b)
    odd = torch.empty(x.numel() + 1, device="cuda")[1:].view(x.shape).copy_(x.detach())
    strided = x.detach().transpose(2, 4).contiguous().transpose(2, 4)
    for input in (odd, strided, torch._neg_view(-x.detach())):
        assert_same(gradients(block, input, w, b), expected)


def test_a_gradient_lies_as_its_tensor_does() -> None:
    for memory_format in FORMATS.values():
        x, w, b = leaves()
        x = leaf(x.detach().contiguous(memory_format=memory_format))
        for function in (block, volup.conv_transpose3d):
            got = gradients(function, x, w, b)
            assert [grad.stride() for grad in got] == [t.stride() for t in (x, w, b)]


def test_an_empty_batch() -> None:
    x, w, b = leaves()
    for function in (block, volup.conv_transpose3d):
        output = function(x[:0], w, b)
        of_input, *others = torch.autograd.grad(output.sum(), (x, w, b))
        assert of_input.shape == x.shape
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in others)


def test_a_call_without_a_batch() -> None:
    x, w, b = leaves()
    one = leaf(x.detach()[0])
    assert_same(gradients(block, one, w, b)[1:], gradients(block, leaf(x.detach()[:1]), w, b)[1:])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_waits_for_nothing() -> None:
    x, w, b = leaves()
    gradients(block, x, w, b)
    gradients(volup.conv_transpose3d, x, w, b)
    grad = torch.randn_like(block(x, w, b))
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(block(x, w, b), (x, w, b), grad)
        torch.autograd.grad(block(x, w, b, memory="save"), (x, w, b), grad)
        torch.autograd.grad(volup.conv_transpose3d(x, w, b), (x, w, b), grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_of_a_step_is_replayed_on_what_is_there_then() -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layer = volup.nn.ConvTranspose3dBlock(32, 48, 3, 2, 1, norm_groups=8, precision="ieee")
        return layer.cuda(), torch.optim.SGD(layer.cuda().parameters(), lr=0.1)

    def step(layer: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        layer(x).square().mean().backward()
        optimizer.step()

    x = example()[0]
    layer, optimizer = made()
    start = {key: value.clone() for key, value in layer.state_dict().items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, optimizer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(layer, optimizer, x)
    layer.load_state_dict(start)
    expected, other = made()
    for seed in (1, 2, 3):
        x.copy_(example(seed=seed)[0])
        graph.replay()
        step(expected, other, x)
        for got, theirs in zip(layer.parameters(), expected.parameters(), strict=True):
            assert torch.equal(got, theirs)


def test_two_streams_at_once() -> None:
    inputs = [leaves(seed=seed) for seed in range(2)]
    alone = [gradients(block, *tensors, stride=2) for tensors in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results: list[list[list[Tensor]]] = [[], []]

    def work(i: int) -> None:
        with torch.cuda.stream(streams[i]):
            results[i] += [gradients(block, *inputs[i], stride=2) for _ in range(20)]

    at_once(work)
    for one, many in zip(alone, results, strict=True):
        assert len(many) == 20
        for got in many:
            assert_same(got, one)


# --- Without kernels, and the example -------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_pytorch_computes_where_there_is_no_engine(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, b = leaves()
    monkeypatch.setattr(_cuda, "_obstacles", {x.device: "no driver"})
    monkeypatch.setattr(_cuda, "_warned", set())
    monkeypatch.setattr(_calls, "_kept", {})
    torch._dynamo.reset()
    function = torch.compile(ieee, fullgraph=True, backend="aot_eager") if compiled else ieee
    # The gradients of what PyTorch composes follow its flags.
    with _compose._precision("ieee"):
        with pytest.warns(RuntimeWarning, match="no driver"):
            got = gradients(function, x, w, b)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            gradients(function, x, w, b)
        expected = gradients(by_pytorch, x, w, b)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)


def test_the_operators_refuse_what_does_not_fit() -> None:
    x, b = X.cuda(), B.cuda()
    with pytest.raises(RuntimeError, match="grad_output must have shape"):
        OPS.conv_transpose3d_weight_grad(x, x, [3] * 3, [1] * 3, [0] * 3, [0] * 3, 1, [1] * 3, None)
    with pytest.raises(RuntimeError, match="weight must be on cuda:0, got device cpu"):
        volup.conv_transpose3d(leaf(x), leaf(W), b)


def test_the_example_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parents[2] / "examples" / "superres"
    if not folder.exists():
        pytest.skip("the example is not here")
    monkeypatch.syspath_prepend(folder)
    spec = importlib.util.spec_from_file_location("superres_train", folder / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    volume = torch.rand(40, 160, 40).numpy()
    layers = [(1, 8, 3, 1, 1, 4), (8, 8, 4, 2, 1, 4), (8, 1, 3, 1, 1, None)]
    options = {"device": "cuda", "steps": 20, "seed": 0, "layers": layers, "dtype": torch.float64}
    # PyTorch's own test tools, which another test imports, freeze its flags for good.
    with torch.backends.__allow_nonbracketed_mutation():
        before = torch.backends.cudnn.benchmark
        ours, theirs = (
            module.train(volume, modules=modules, **options)[1] for modules in ("volup", "torch")
        )
        torch.backends.cudnn.benchmark = before
    assert module.farthest_apart(ours, theirs) < 1e-6
