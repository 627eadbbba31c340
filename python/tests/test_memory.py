"""Which tensors are read, where, and in which memory format the output is."""

import re

import pytest
import torch
import torch.nn.functional as F
from samples import B, W, X, close, close_to_rounded
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

import volup
from volup import _cpu

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


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
    ("got device meta", lambda t: t.to("meta")),
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


def test_fake_tensors_give_fake_tensors() -> None:
    theirs = F.conv_transpose3d(X, W, B, 2)
    with FakeTensorMode() as mode:
        got = volup.conv_transpose3d(mode.from_tensor(X), mode.from_tensor(W), stride=2)
        assert (type(got), got.shape) == (FakeTensor, theirs.shape)
    with FakeTensorMode(allow_non_fake_inputs=True):
        got = volup.conv_transpose3d_block(X, W, B, 2, norm_groups=3)
        assert (type(got), got.shape) == (FakeTensor, theirs.shape)


def test_refuses_functorchs_wrappers() -> None:
    with pytest.raises(RuntimeError, match=r"cannot be transformed by torch\.func"):
        torch.vmap(lambda x: volup.conv_transpose3d(x, W))(X)
    with pytest.raises(RuntimeError, match=r"cannot be transformed by torch\.func"):
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
        close_to_rounded(got, torch.bfloat16, X, weight, bias)
        check()


def test_keeps_nothing_of_parameters_that_are_gone() -> None:
    weight = torch.nn.Parameter(W.clone(), requires_grad=False)
    before = len(_cpu._caches)
    volup.conv_transpose3d(X, weight)
    assert len(_cpu._caches) == before + 1
    del weight
    assert len(_cpu._caches) == before
