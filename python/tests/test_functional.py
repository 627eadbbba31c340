"""The two functions: arguments, errors, memory formats, threads, modes."""

import multiprocessing
import os
import re
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import volup
from volup import functional

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 3, 4, 5), (4, 6, 3, 3, 3), (6,))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def close(got: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(got, theirs, rtol=1e-4, atol=1e-4, check_stride=True)


# --- arguments ---------------------------------------------------------------------------------


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
    input, weight, bias = example()
    theirs = F.conv_transpose3d(input, weight, bias, **options)
    close(volup.conv_transpose3d(input, weight, bias, **options), theirs)


def test_has_the_parameters_of_pytorch_in_their_order() -> None:
    input, weight, _ = example()
    weight, bias = weight[:, :3], torch.randn(6)
    arguments = (input, weight, bias, 2, 1, 1, 2, 1)
    theirs = F.conv_transpose3d(*arguments)
    close(volup.conv_transpose3d(*arguments), theirs)
    close(volup.conv_transpose3d_block(*arguments), theirs)


@pytest.mark.parametrize("name", ["ieee", "tf32", None])
def test_precision_changes_nothing_on_the_cpu(name: str | None) -> None:
    input, weight, bias = example()
    got = volup.conv_transpose3d(input, weight, bias, precision=name)
    assert torch.equal(got, volup.conv_transpose3d(input, weight, bias))


# --- errors ------------------------------------------------------------------------------------

X, W, B = example()
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


@pytest.mark.parametrize(("kind", "text", "change"), CONV_ERRORS, ids=name_of)
def test_pytorch_raises_the_same_class(kind: type, text: str, change: dict) -> None:
    if "precision" in change or change.get("stride") == 2**40:
        pytest.skip("not a case for PyTorch")
    if change.get("stride") == 2**62:
        pytest.skip("PyTorch's size wraps")
    arguments = {"input": X, "weight": W, "bias": B, **change}
    with pytest.raises(kind):
        F.conv_transpose3d(**arguments)


def test_a_single_value_a_group_is_pytorchs_value_error() -> None:
    input, weight = torch.randn(1, 4, 1, 1, 1), torch.randn(4, 6, 1, 1, 1)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        F.group_norm(F.conv_transpose3d(input, weight), 6)
    with pytest.raises(ValueError, match="norm_groups must leave more than 1 value"):
        volup.conv_transpose3d_block(input, weight, norm_groups=6)


# --- what a tensor can be besides a plain array ------------------------------------------------


def shrunk(tensor: Tensor, share: float) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(int(tensor.nbytes * share))
    return tensor


DTYPE_TEXT = "must have dtype float32, float64, float16 or bfloat16, got "
STRANGE = [
    ("must be a strided tensor, got layout torch.sparse_coo", lambda t: t.to_sparse()),
    (DTYPE_TEXT + "torch.int64", lambda t: t.long()),
    (DTYPE_TEXT + "torch.bool", lambda t: t.bool()),
    (DTYPE_TEXT + "torch.complex64", lambda t: t.cfloat()),
    (DTYPE_TEXT + "torch.float8_e5m2", lambda t: t.to(torch.float8_e5m2)),
    ("must be on the CPU, got device meta", lambda t: t.to("meta")),
    ("has no memory: its storage was freed", lambda t: shrunk(t, 0)),
    ("has no memory: its storage was freed", lambda t: shrunk(t, 0.5)),
    ("a tensor has no memory", lambda t: torch._efficientzerotensor(t.shape)),
]


@pytest.mark.parametrize("which", ["input", "weight", "bias"])
@pytest.mark.parametrize(("text", "make"), STRANGE)
def test_refuses_what_is_no_plain_array(which: str, text: str, make) -> None:
    arguments = {"input": X, "weight": W, "bias": B}
    arguments[which] = make(arguments[which])
    with pytest.raises(RuntimeError, match=re.escape(text)):
        volup.conv_transpose3d(**arguments)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
def test_refuses_onednn_tensors() -> None:
    with pytest.raises(RuntimeError, match=r"must be a strided tensor, got layout torch\._mkldnn"):
        volup.conv_transpose3d(X.to_mkldnn(), W, B)


@pytest.mark.filterwarnings("ignore")
def test_refuses_quantized_and_nested_tensors() -> None:
    quantized = torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)
    with pytest.raises(RuntimeError, match=r"must have dtype .*, got torch\.quint8"):
        volup.conv_transpose3d(quantized, W, B)
    with pytest.raises(RuntimeError, match="must be a strided tensor, got a nested one"):
        volup.conv_transpose3d(torch.nested.nested_tensor([X, X]), W, B)


def test_names_every_device() -> None:
    with pytest.raises(RuntimeError, match="weight must be on the CPU, got device meta"):
        volup.conv_transpose3d(X, W.to("meta"), B)


def test_refuses_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
        with pytest.raises(RuntimeError, match=r"input must be a plain torch\.Tensor, got Fake"):
            volup.conv_transpose3d(fake, mode.from_tensor(W))
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match=r"must be a plain torch\.Tensor, got Fake"),
    ):
        volup.conv_transpose3d(X, W)


def test_refuses_functorchs_wrappers() -> None:
    with pytest.raises(RuntimeError, match="doesn't have storage"):
        torch.vmap(lambda x: volup.conv_transpose3d(x, W))(X)
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.func.grad(lambda x: volup.conv_transpose3d(x, W).sum())(X)


def test_resolves_negation_views() -> None:
    negative = torch.conj(torch.complex(X, -X)).imag
    assert negative.is_neg()
    close(volup.conv_transpose3d(negative, W, B), F.conv_transpose3d(X, W, B))


def test_copies_misaligned_memory() -> None:
    memory = bytearray(b"x" + X.numpy().tobytes())
    misaligned = torch.frombuffer(memory, dtype=torch.float32, offset=1).reshape(X.shape)
    assert misaligned.data_ptr() % 4
    close(volup.conv_transpose3d(misaligned, W, B), F.conv_transpose3d(X, W, B))


def test_subclasses_keep_their_class() -> None:
    class Tagged(torch.Tensor):
        pass

    got = volup.conv_transpose3d(X.as_subclass(Tagged), W, B)
    assert type(got) is Tagged
    close(got.as_subclass(torch.Tensor), F.conv_transpose3d(X, W, B))


def test_torch_function_modes_see_the_call() -> None:
    calls = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    with Spy():
        volup.conv_transpose3d(X, W, B)
        volup.conv_transpose3d_block(X, W, B, activation="relu")
    assert calls[0] is volup.conv_transpose3d
    assert volup.conv_transpose3d_block in calls


def test_lazy_parameters_raise_pytorchs_error() -> None:
    lazy = torch.nn.LazyConvTranspose3d(6, 3)
    with pytest.raises(ValueError, match="uninitialized parameter"):
        volup.conv_transpose3d(X, lazy.weight)


# --- gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["input", "weight", "bias", "norm_weight", "norm_bias"])
def test_no_gradients_yet(which: str) -> None:
    arguments = {"input": X, "weight": W, "bias": B, "norm_weight": B, "norm_bias": B}
    arguments[which] = arguments[which].clone().requires_grad_()
    call = partial(volup.conv_transpose3d_block, **arguments, norm_groups=2)
    with pytest.raises(
        RuntimeError, match=f"{which} requires grad.*wrap the call in torch.no_grad"
    ):
        call()
    with torch.no_grad():
        without = call()
    with torch.inference_mode():
        inference = call()
    assert not without.requires_grad
    assert torch.equal(without, inference)


def test_no_tangents() -> None:
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="input has a tangent"):
        volup.conv_transpose3d(forward_ad.make_dual(X, X), W)


@pytest.mark.filterwarnings("ignore")
def test_no_traces() -> None:
    with pytest.raises(RuntimeError, match=r"cannot be recorded by torch\.jit\.trace"):
        torch.jit.trace(lambda x: volup.conv_transpose3d(x, W), (X,))


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [(1, 1, 1), (3, 3, 3), (4, 4, 4)], ids=str)
@pytest.mark.parametrize("batch", [0, 1, 2, 17])
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_formats_are_pytorchs(
    dtype: torch.dtype, kernel: tuple, batch: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for channels in (1, 4):
            for options in ({}, {"stride": 2, "groups": channels}, {"stride": 2, "dilation": 3}):
                input = torch.randn(batch, channels, 2, 3, 2).to(dtype)
                last = input.to(memory_format=torch.channels_last_3d)
                wide = torch.randn(batch, 2 * channels, 2, 3, 2).to(dtype)
                wide = wide.to(memory_format=torch.channels_last_3d)
                weight = torch.randn(channels, 3, *kernel).to(dtype)
                weight_last = weight.to(memory_format=torch.channels_last_3d)
                for x in (input, last, input.transpose(2, 4), wide[:, ::2], *input[:1], *last[:1]):
                    for w in (weight, weight_last):
                        got = volup.conv_transpose3d(x, w, **options)
                        theirs = F.conv_transpose3d(x, w, **options)
                        assert got.stride() == theirs.stride(), (x.stride(), w.stride(), options)
                        if x.dim() == 5:
                            normed = volup.conv_transpose3d_block(x, w, norm_groups=1, **options)
                            assert normed.stride() == F.group_norm(theirs, 1).stride()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last_3d),
        lambda x: x.transpose(2, 4).contiguous().transpose(2, 4),
        lambda x: x.repeat_interleave(2, 1)[:, ::2],
        lambda x: F.pad(x, (1, 2, 3, 4))[..., 3:-4, 1:-2],
        lambda x: x[:1].expand(2, -1, -1, -1, -1),
        lambda x: x[0, 0, 0, 0, :1].expand(x.shape),
        lambda x: x[0],
        lambda x: x.contiguous(memory_format=torch.channels_last_3d)[1],
    ],
)
def test_any_strides(view) -> None:
    x = view(X)
    close(volup.conv_transpose3d(x, W, B, 2), F.conv_transpose3d(x, W, B, 2))


def test_any_strides_of_parameters() -> None:
    weight = W.transpose(2, 4)
    close(volup.conv_transpose3d(X, weight, B, 2), F.conv_transpose3d(X, weight, B, 2))
    bias = torch.randn(12)[::2]
    close(volup.conv_transpose3d(X, W, bias), F.conv_transpose3d(X, W, bias))


def test_output_never_aliases() -> None:
    input = torch.randn(1, 1, 2, 2, 2)
    before = input.clone()
    got = volup.conv_transpose3d(input, torch.ones(1, 1, 1, 1, 1))
    assert got.untyped_storage().data_ptr() != input.untyped_storage().data_ptr()
    got.zero_()
    assert torch.equal(input, before)


def test_sees_every_change_of_the_parameters() -> None:
    weight, bias = torch.nn.Parameter(W.clone()), torch.nn.Parameter(B.clone())

    def check(input: Tensor = X, stride: int = 1) -> None:
        for _ in range(2):
            got = volup.conv_transpose3d(input, weight, bias, stride)
            close(got, F.conv_transpose3d(input, weight, bias, stride))

    with torch.no_grad():
        check()
        weight.mul_(2)
        check()
        weight.data[0, 0, 0, 0, 0] = 7.0  # bypasses the version counter
        check()
        weight.numpy()[1, 1, 1, 1, 1] = 7.0  # so does this
        check()
        bias.data.add_(1)
        check()
        weight.data = W.clone()
        check()
        check(stride=2)
        check()
        weight.data, bias.data = weight.double(), bias.double()
        check(X.double())
        weight.data, bias.data = weight.float(), bias.float()
        with torch.autocast("cpu", torch.bfloat16):
            got = volup.conv_transpose3d(X, weight, bias)
            theirs = F.conv_transpose3d(X, weight, bias)
            torch.testing.assert_close(got, theirs, rtol=2e-2, atol=2e-2)
        check()


def test_keeps_nothing_of_parameters_that_are_gone() -> None:
    weight = torch.nn.Parameter(W.clone(), requires_grad=False)
    before = len(functional._caches)
    volup.conv_transpose3d(X, weight)
    assert len(functional._caches) == before + 1
    del weight
    assert len(functional._caches) == before


# --- norm parameters ---------------------------------------------------------------------------


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


# --- autocast ----------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_pytorch_does(to: torch.dtype) -> None:
    with torch.autocast("cpu", to):
        got = volup.conv_transpose3d(X, W, B)
        theirs = F.conv_transpose3d(X, W, B)
        assert got.dtype == theirs.dtype == to
        torch.testing.assert_close(got, theirs, rtol=2e-2, atol=2e-2)
        assert volup.conv_transpose3d_block(X, W, B, norm_groups=2).dtype == to
        double = volup.conv_transpose3d(X.double(), W.double())
        assert double.dtype == F.conv_transpose3d(X.double(), W.double()).dtype == torch.float64


# --- threads -----------------------------------------------------------------------------------


def test_thread_counts_agree() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(volup.conv_transpose3d_block(X, W, B, 2, norm_groups=3))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_other_python_threads_go_on() -> None:
    input, weight = torch.randn(1, 32, 48, 48, 48), torch.randn(32, 32, 3, 3, 3)
    volup.conv_transpose3d(input[..., :4], weight)
    ticks = []
    started, done = threading.Event(), threading.Event()

    def tick() -> None:
        started.set()
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    started.wait()
    begin = time.perf_counter()
    volup.conv_transpose3d(input, weight)
    end = time.perf_counter()
    done.set()
    thread.join()
    # With the GIL held, no tick could lie inside the call but at its very ends.
    inside = [t for t in ticks if begin + 0.2 * (end - begin) < t < begin + 0.8 * (end - begin)]
    assert inside


def test_many_python_threads_at_once() -> None:
    expected = volup.conv_transpose3d_block(X, W, B, 2, norm_groups=3, activation="gelu")
    wrong = []

    def work() -> None:
        for _ in range(20):
            got = volup.conv_transpose3d_block(X, W, B, 2, norm_groups=3, activation="gelu")
            if not torch.equal(got, expected):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def compute_in_child(queue) -> None:
    torch.set_num_threads(2)
    queue.put(volup.conv_transpose3d(X, W, B).sum().item())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_computes_after_a_fork() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = volup.conv_transpose3d(X, W, B).sum().item()
    finally:
        torch.set_num_threads(before)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=compute_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == pytest.approx(expected, rel=1e-4)
    child.join(timeout=60)
    assert child.exitcode == 0


# --- torch.compile -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_calls_it() -> None:
    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        return volup.conv_transpose3d(x * 2, W, B) + 1

    with torch.no_grad():
        close(compiled(X), F.conv_transpose3d(X * 2, W, B) + 1)
