"""On a GPU: every case of the engines' table against float64, and how the calls behave there."""

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import reference
import torch
import torch.nn.functional as F
from test_conformance import CASES, tensors_of
from torch import Tensor

import volup
from volup import _calls, _compose, _native

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")

# Unit roundoff of TF32, to which factors are rounded.
TF32 = 2.0**-11
KINDS = {
    "float32-ieee": (torch.float32, "ieee"),
    "float32-tf32": (torch.float32, "tf32"),
    "float16": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
    "float64": (torch.float64, None),
}
PUBLISHED = {case["name"]: case for case in _native.published()}
FORMATS = {False: torch.contiguous_format, True: torch.channels_last_3d}


def run(input: Tensor, parameters: dict, spec: dict, precision: str | None = None) -> Tensor:
    keys = ("stride", "padding", "output_padding", "groups", "dilation")
    steps = ("activation", "norm_groups", "eps", "post_activation")
    options = {key: spec[key] for key in keys + steps}
    return volup.conv_transpose3d_block(input, **parameters, **options, precision=precision)


def on_gpu(case: dict, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor | None]]:
    input, parameters = tensors_of(case, dtype)
    return input.cuda(), {key: None if t is None else t.cuda() for key, t in parameters.items()}


def example(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight and a bias, large enough for every family of kernels."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((2, 32, 7, 8, 9), (32, 48, 3, 3, 3), (48,))
    x, w, b = (torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes)
    return x, w, b


def at_once(work: Callable[[int], None]) -> None:
    """Does work 0 and work 1 in threads of their own, and waits for what they queued."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()


BLOCK = {"activation": "relu", "norm_groups": 8, "post_activation": "silu"}
block = partial(volup.conv_transpose3d_block, **BLOCK)
ieee = partial(block, precision="ieee")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, kind: str) -> None:
    dtype, precision = KINDS[kind]
    spec = CASES[name]["block"]
    given, parameters = on_gpu(CASES[name], dtype)
    values, bounds = reference.expected(
        given, parameters, spec, TF32 if precision == "tf32" else 0.0
    )
    for memory_format in FORMATS.values():
        batch = given if given.dim() == 5 else given[None]
        input = batch.contiguous(memory_format=memory_format).reshape(given.shape)
        got = run(input, parameters, spec, precision)
        assert (got.dtype, got.device) == (dtype, given.device)
        reference.assert_within(got, values, bounds)
        assert got.stride() == reference.block(input, parameters, spec).stride()
        again = run(input, parameters, spec, precision)
        assert torch.equal(got.nan_to_num(), again.nan_to_num())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("random", [torch.rand, torch.randn])
def test_ieee_is_as_exact_as_float32(random, seed: int) -> None:
    case = PUBLISHED["kb2-61-block"]
    spec = case["block"]
    torch.manual_seed(seed)
    input = random(case["batch"], spec["in_channels"], *case["input"], device="cuda")
    layer = volup.nn.ConvTranspose3dBlock(**spec, precision="ieee", device="cuda")
    parameters = {
        "weight": layer.conv.weight.detach(),
        "bias": None if layer.conv.bias is None else layer.conv.bias.detach(),
        "norm_weight": layer.norm.weight.detach(),
        "norm_bias": layer.norm.bias.detach(),
    }
    with torch.no_grad():
        got = layer(input)
        with _compose._precision("ieee"):
            theirs = reference.block(input, parameters, spec)
        assert torch.allclose(got, theirs, atol=1e-5, rtol=1e-5)
        del theirs
        wide = {key: None if t is None else t.double() for key, t in parameters.items()}
        exact = reference.block(input.double(), wide, spec)
        assert torch.allclose(got.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_special_values_reach_what_they_should(special: float, stride: int, kind: str) -> None:
    dtype, precision = KINDS[kind]
    for which in (0, 1):
        tensors = example(dtype)
        # Positive, so that no infinity meets another of the other sign.
        tensors = [tensor.abs() + 0.25 for tensor in tensors]
        tensors[which][(1, 2, *(tensors[which].shape[i] // 2 for i in (2, 3, 4)))] = special
        got = volup.conv_transpose3d(*tensors, stride, 1, precision=precision).cpu()
        theirs = F.conv_transpose3d(*(t.cpu().double() for t in tensors), stride, 1)
        assert torch.equal(got.isfinite(), theirs.isfinite())
        assert torch.equal(got.isnan(), theirs.isnan())
        assert torch.equal(got[got.isinf()].double(), theirs[theirs.isinf()])


@pytest.mark.parametrize("others", [0.0, 1e-4, 0.05])
@pytest.mark.parametrize("channels_last", FORMATS)
def test_a_sample_may_miss_the_largest(channels_last: bool, others: float) -> None:
    """Of a large input a part is looked at to find what to scale it by, here seldom the largest."""
    spec = {key: 1 for key in ("stride", "groups", "dilation", "padding")}
    spec |= {"output_padding": 0, "eps": 1e-5}
    spec |= dict.fromkeys(("activation", "norm_groups", "post_activation"))
    generator = torch.Generator("cuda").manual_seed(2)
    noise, w = (
        torch.randn(shape, generator=generator, device="cuda")
        for shape in ((2, 32, 24, 40, 40), (32, 32, 3, 3, 3))
    )
    parameters = dict.fromkeys(("bias", "norm_weight", "norm_bias")) | {"weight": w}
    for at in (7, 1_234_567, 2_000_001, 2_345_678):
        x = noise * others
        x.view(-1)[at] = 3.0
        given = x.contiguous(memory_format=FORMATS[channels_last])
        got = run(given, parameters, spec, "ieee")
        reference.assert_within(got, *reference.expected(x, parameters, spec, 2.0**-21))


@pytest.mark.parametrize(("kernel", "stride", "size"), [(2, 2, 163), (3, 1, 324)])
@pytest.mark.parametrize("channels_last", FORMATS)
def test_more_elements_than_32_bits_count(
    channels_last: bool, kernel: int, stride: int, size: int
) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("less than 20 GB of free memory")
    generator = torch.Generator("cuda").manual_seed(0)
    normal = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    input = normal(1, 4, size, size, size).contiguous(memory_format=FORMATS[channels_last])
    weight = normal(4, 64, kernel, kernel, kernel)
    got = volup.conv_transpose3d(input, weight, None, stride)
    assert got.numel() > 2**31
    # The last plane depends on the input's last planes alone.
    spec = {"stride": stride, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    spec |= {"activation": None, "norm_groups": None, "post_activation": None}
    parameters = {"weight": weight, "bias": None}
    values, bounds = reference.expected(input[:, :, -kernel:], parameters, spec)
    reference.assert_within(got[:, :, -1:], values[:, :, -1:], bounds[:, :, -1:])
    del got
    torch.cuda.empty_cache()


def test_a_graph_is_replayed_on_what_is_there_then() -> None:
    x, w, b = example()
    norm = torch.rand(48, device="cuda"), torch.rand(48, device="cuda")
    call = partial(ieee, x, w, b, 2, 1, norm_weight=norm[0], norm_bias=norm[1])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for seed in (1, 2):
        for tensor, value in zip((x, w, b), example(seed=seed), strict=True):
            tensor.copy_(value)
        norm[0].mul_(1.5)
        graph.replay()
        assert torch.equal(got, call())
    for other in (got, x):
        other.zero_()
    graph.replay()
    assert torch.equal(got, call())


@pytest.mark.parametrize("trains", [False, True])
def test_calls_in_a_row_keep_their_own_tensors(trains: bool) -> None:
    def results(seed: int, function: Callable[..., Tensor]) -> list[Tensor]:
        tensors = [t.requires_grad_(trains) for t in example(seed=seed)]
        output = function(*tensors, 2, 1)
        return [output, *(torch.autograd.grad(output.sum(), tensors) if trains else ())]

    exact = partial(volup.conv_transpose3d, precision="ieee")
    for function in (ieee, exact, partial(ieee, memory="save")):
        expected = []
        for seed in range(12):
            # As the first of its kind.
            _calls._kept.clear()
            expected.append(results(seed, function))
        torch.cuda.synchronize()
        for _ in range(2):
            torch.cuda._sleep(20_000_000)
            got = [results(seed, function) for seed in range(12)]
            for ours, alone in zip(got, expected, strict=True):
                assert all(torch.equal(*pair) for pair in zip(ours, alone, strict=True))


def test_two_streams_at_once() -> None:
    inputs = [example(seed=seed) for seed in range(2)]
    alone = [ieee(*tensors, 2, 1) for tensors in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results: list[list[Tensor]] = [[], []]

    def work(i: int) -> None:
        with torch.cuda.stream(streams[i]), torch.no_grad():
            results[i] += [ieee(*inputs[i], 2, 1) for _ in range(50)]

    at_once(work)
    for one, many in zip(alone, results, strict=True):
        assert len(many) == 50
        assert all(torch.equal(one, got) for got in many)


def test_runs_after_what_was_queued_before() -> None:
    x, w, b = example()
    expected = ieee(x + 1, w, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.add_(1)
        got = ieee(x, w, b)
    stream.synchronize()
    assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_waits_for_nothing() -> None:
    x, w, b = example()
    block(x, w, b)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    volup.conv_transpose3d(last, w, b)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for weight in (w, w * 2):
            block(x, weight, b)
            volup.conv_transpose3d(last, weight, b)
            block(x[:1], weight, b)
        with torch.autocast("cuda", torch.float16):
            block(x, w, b)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch(kind: str) -> None:
    dtype, precision = KINDS[kind]
    x, w, b = example(dtype)
    got = volup.conv_transpose3d(x[:0], w, b, 2, precision=precision)
    theirs = F.conv_transpose3d(x[:0], w, b, 2)
    assert (got.shape, got.dtype, got.device) == (theirs.shape, dtype, x.device)


def test_without_a_batch() -> None:
    x, w, b = example()
    assert torch.equal(ieee(x[0], w, b), ieee(x[:1], w, b)[0])
    last = x.contiguous(memory_format=torch.channels_last_3d)
    got, theirs = volup.conv_transpose3d(last[0], w, b), F.conv_transpose3d(last[0], w, b)
    assert got.stride() == theirs.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_formats_are_pytorchs(dtype: torch.dtype) -> None:
    for channels in (1, 8):
        x = torch.randn(2, channels, 3, 4, 5, device="cuda").to(dtype)
        w = torch.randn(channels, 8, 3, 3, 3, device="cuda").to(dtype)
        wide = x.repeat_interleave(2, 1).to(memory_format=torch.channels_last_3d)
        last = partial(Tensor.to, memory_format=torch.channels_last_3d)
        for input in (x, last(x), x.transpose(2, 4), wide[:, ::2], x[:0], x[0], last(x)[0]):
            for weight in (w, last(w)):
                for options in ({}, {"stride": 2, "groups": channels}):
                    got = volup.conv_transpose3d(input, weight, **options)
                    theirs = F.conv_transpose3d(input, weight, **options)
                    assert got.stride() == theirs.stride(), (input.stride(), options)
                    torch.testing.assert_close(got, theirs, rtol=2e-2, atol=2e-1)


def test_any_strides_and_addresses() -> None:
    x, w, b = example()
    expected = ieee(x, w, b)
    memory = torch.empty(x.numel() + 1, device="cuda")
    odd = memory[1:].view(x.shape).copy_(x)
    assert odd.data_ptr() % 16
    assert torch.equal(ieee(odd, w, b), expected)
    for view in (x.transpose(2, 4).contiguous().transpose(2, 4), F.pad(x, (1, 2))[..., 1:-2]):
        assert torch.equal(ieee(view, w, b), expected)
    assert torch.equal(ieee(x, w.transpose(2, 4).contiguous().transpose(2, 4), b), expected)
    assert torch.equal(ieee(x, w, b.repeat_interleave(2)[::2]), expected)
    negative = torch._neg_view(-x)
    assert negative.is_neg()
    assert torch.equal(ieee(negative, w, b), expected)


@pytest.fixture
def flags() -> Iterator[None]:
    """Leaves the precision flags as they were.

    They are set below `torch.backends`, which PyTorch's own test helpers freeze on import.
    """
    before = _compose.flagged_precision()
    yield
    torch._C._set_cudnn_allow_tf32(before == "tf32")
    _compose._set_precision(before)


def test_follows_the_flags(flags: None) -> None:
    tensors = example()
    exact, rounded = (block(*tensors, precision=name) for name in ("ieee", "tf32"))
    for allowed, expected in ((True, rounded), (False, exact), (True, rounded)):
        torch._C._set_cudnn_allow_tf32(allowed)
        assert torch.equal(block(*tensors), expected)
    if _compose._get_precision is not None:
        for name, expected in (("ieee", exact), ("tf32", rounded)):
            _compose._set_precision(name)
            assert torch.equal(block(*tensors), expected)


def test_autocast_casts_as_pytorch_does() -> None:
    x, w, b = example()
    for to in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", to):
            got = volup.conv_transpose3d(x, w, b)
            theirs = F.conv_transpose3d(x, w, b)
            assert got.dtype == theirs.dtype == to
            assert block(x, w, b).dtype == to
            double = volup.conv_transpose3d(x.double(), w.double(), b.double())
            assert double.dtype == torch.float64
        assert torch.equal(got, volup.conv_transpose3d(x.to(to), w.to(to), b.to(to)))
    with torch.autocast("cpu", torch.bfloat16):
        assert volup.conv_transpose3d(x, w, b).dtype == torch.float32


def test_sees_every_change_of_the_parameters() -> None:
    x, w, b = example()
    weight, bias = torch.nn.Parameter(w), torch.nn.Parameter(b)
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)
    for _ in range(3):
        with torch.no_grad():
            got = volup.conv_transpose3d(x, weight, bias, precision="ieee")
            with _compose._precision("ieee"):
                theirs = F.conv_transpose3d(x, weight, bias)
            torch.testing.assert_close(got, theirs, rtol=1e-4, atol=1e-3)
        weight.grad, bias.grad = torch.randn_like(weight), torch.randn_like(bias)
        optimizer.step()
    weight.data.zero_()
    with torch.no_grad():
        got = volup.conv_transpose3d(x, weight, bias)
    assert torch.equal(got, bias.detach().reshape(1, -1, 1, 1, 1).expand_as(got))


@pytest.mark.parametrize("kind", ["float32-ieee", "float32-tf32", "bfloat16"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_little_memory_beside_the_output(name: str, kind: str) -> None:
    dtype, precision = KINDS[kind]
    case = PUBLISHED[name]
    spec = case["block"]
    input = torch.randn(case["batch"], spec["in_channels"], *case["input"], device="cuda").to(dtype)
    layer = volup.nn.ConvTranspose3dBlock(**spec, precision=precision, device="cuda", dtype=dtype)
    with torch.no_grad():
        layer(input)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = layer(input)
    beside = torch.cuda.max_memory_allocated() - before - output.nbytes
    assert beside <= 2.5 * input.nbytes + 2**20


def test_all_on_one_device() -> None:
    x, w, b = example()
    for tensors in ((x, w.cpu(), b), (x.cpu(), w, b), (x, w, b.cpu())):
        with pytest.raises(RuntimeError, match=r"must be on (the CPU|cuda:0), got device"):
            volup.conv_transpose3d(*tensors)
        with pytest.raises(RuntimeError):
            F.conv_transpose3d(*tensors)


def test_freed_memory_is_not_read() -> None:
    x, w, b = example()
    volup.conv_transpose3d(x, w, b)
    w.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="weight has no memory: its storage was freed"):
        volup.conv_transpose3d(x, w, b)


@pytest.mark.parametrize("to", [None, torch.float16, torch.bfloat16], ids=str)
def test_optimized_models_give_what_they_gave(to: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.ConvTranspose3d(32, 16, 2, 2),
        torch.nn.ReLU(),
        torch.nn.GroupNorm(4, 16),
        torch.nn.ConvTranspose3d(16, 16, 3, 2, 1, 1),
        torch.nn.InstanceNorm3d(16),
        torch.nn.LeakyReLU(),
        torch.nn.ConvTranspose3d(16, 2, 3, padding=1),
    ).cuda()
    x = torch.randn(2, 32, 5, 6, 7, device="cuda")
    enabled = to is not None
    with torch.no_grad(), torch.autocast("cuda", to, enabled=enabled):
        for chain, tolerance in ((model, 5e-2), (model[:3], 5e-2)):
            theirs = chain(x)
            report = volup.optimize(chain)
            assert report.replaced
            assert not report.skipped
            got = chain(x)
            volup.restore(chain)
            assert (got.dtype, got.stride()) == (theirs.dtype, theirs.stride())
            torch.testing.assert_close(got, theirs, rtol=tolerance, atol=tolerance)


def test_a_decoder_moves_to_the_gpu(tmp_path) -> None:
    decoder = volup.nn.Decoder(
        volup.nn.ConvTranspose3dBlock(4, 8, 2, 2, norm_groups=2, precision="ieee"),
        volup.nn.ConvTranspose3dBlock(8, 4, 3, 1, 1, activation=None, precision="ieee"),
        skip="trilinear",
        normalize="max",
    )
    x = torch.randn(1, 4, 5, 6, 7)
    with torch.no_grad():
        expected = decoder(x)
        got = decoder.cuda()(x.cuda())
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)
    volup.export(decoder, tmp_path / "decoder.safetensors")
    loaded = volup.nn.Decoder.load(tmp_path / "decoder.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), expected)


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_calls_it() -> None:
    x, w, b = example()

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        return block(x * 2, w, b, precision="ieee") + 1

    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), ieee(x * 2, w, b) + 1)
