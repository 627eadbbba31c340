"""Without a GPU: PyTorch's operators in the engine's place, plans, and who computes when."""

import warnings
from types import SimpleNamespace

import pytest
import reference
import torch
import torch.nn.functional as F
from samples import B, W, X, close
from stand_in import pretend
from test_conformance import CASES, run, tensors_of

import volup
from volup import _calls, _compose, _cuda, _native

CONV = ("stride", "padding", "output_padding", "groups", "dilation")
STEPS = ("activation", "norm_groups", "eps", "post_activation")


def block_of(spec: dict, parameters: dict) -> _native.Block:
    return _native.Block(
        parameters["weight"].shape,
        *(spec[key] for key in CONV),
        parameters["bias"] is not None,
        spec["activation"],
        spec["norm_groups"],
        parameters["norm_weight"] is not None,
        spec["eps"],
        spec["post_activation"],
    )


@pytest.mark.parametrize("name", CASES)
def test_the_composition_is_the_block(name: str) -> None:
    spec = CASES[name]["block"]
    input, parameters = tensors_of(CASES[name], torch.float64)
    given = {key: t for key, t in parameters.items() if t is not None}
    steps = (spec[key] for key in STEPS)
    got = _compose.compose(block_of(spec, parameters), {"input": input, **given}, *steps, None)
    torch.testing.assert_close(got, run(input, parameters, spec), rtol=1e-10, atol=1e-10)
    assert got.shape == reference.block(input, parameters, spec).shape


def compose(input: torch.Tensor, weight: torch.Tensor, precision: str | None) -> torch.Tensor:
    block = _native.Block(
        weight.shape, 1, 0, 0, 1, 1, False, "relu", 2, False, 1e-5, ("leaky_relu", 0.1)
    )
    tensors = {"input": input, "weight": weight}
    return _compose.compose(block, tensors, "relu", 2, 1e-5, ("leaky_relu", 0.1), precision)


def test_the_composition_has_gradients() -> None:
    input, weight = X.double().requires_grad_(), W.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: compose(x, w, None), (input[:1, :, :2], weight))


def test_the_composition_is_not_cast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert compose(X, W, None).dtype == torch.float32


@pytest.fixture
def flags():
    """Leaves the precision flags as they were.

    They are set below `torch.backends`, which PyTorch's own test helpers freeze on import.
    """
    before = _compose.flagged_precision()
    yield
    _compose._set_precision(before)
    torch._C._set_cudnn_allow_tf32(before == "tf32")


def test_the_flags_are_read_and_put_back(flags: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    theirs = F.conv_transpose3d

    def spy(*arguments: object) -> torch.Tensor:
        seen.append(_compose.flagged_precision())
        return theirs(*arguments)

    monkeypatch.setattr(F, "conv_transpose3d", spy)
    for allowed in (True, False):
        torch._C._set_cudnn_allow_tf32(allowed)
        flagged = "tf32" if allowed else "ieee"
        for precision in ("ieee", "tf32", None):
            compose(X, W, precision)
            assert seen.pop() == (precision or flagged)
            assert _compose.flagged_precision() == flagged


@pytest.mark.skipif(_compose._get_precision is None, reason="before PyTorch 2.9")
def test_newer_flags(flags: None) -> None:
    for value in ("ieee", "tf32", "ieee"):
        _compose._set_precision(value)
        assert _compose.flagged_precision() == value
    # The old flag cannot be read now that the two disagree.
    _compose._set_precision("tf32")
    torch._C._set_cudnn_allow_tf32(False)
    assert _compose.flagged_precision() == "ieee"
    _compose._set_precision("tf32")
    assert _compose.flagged_precision() == "tf32"


def test_without_a_gpu_the_status_says_so() -> None:
    if not torch.cuda.is_available():
        assert isinstance(_native.cuda_status(0), str)
    assert isinstance(_native.cuda_status(10**6), str)


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(_cuda, "_obstacles", {})
    monkeypatch.setattr(_cuda, "_warned", set())
    native = SimpleNamespace(**{**vars(_native), "cuda_status": lambda ordinal: "no driver"})
    monkeypatch.setattr(_cuda, "_native", native)
    return "no driver"


def test_falls_back_and_warns_once(no_engine: str) -> None:
    with pytest.warns(RuntimeWarning, match=no_engine):
        got = volup.conv_transpose3d(pretend(X), W, B, 2)
    # A second warning would be an error here.
    volup.conv_transpose3d(pretend(X), W, B, 2)
    volup.conv_transpose3d_block(pretend(X), W, B, activation="relu")
    close(got.as_subclass(torch.Tensor), F.conv_transpose3d(X, W, B, 2))


def test_the_fallback_has_gradients_and_the_usual_errors(no_engine: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight = W.clone().requires_grad_()
        volup.conv_transpose3d_block(pretend(X), weight, B, norm_groups=2).square().sum().backward()
        theirs = W.clone().requires_grad_()
        F.group_norm(F.conv_transpose3d(X, theirs, B), 2).square().sum().backward()
        torch.testing.assert_close(weight.grad, theirs.grad, rtol=1e-3, atol=1e-3)
        with pytest.raises(RuntimeError, match=r"bias must have shape \[6\], got \[3\]"):
            volup.conv_transpose3d(pretend(X), W, B[:3])
        with pytest.raises(TypeError, match="argument 'stride' must be int"):
            volup.conv_transpose3d(pretend(X), W, B, 1.0)


class Launches:
    """Stands for the engine: counts what is planned and launched, and computes nothing."""

    planned = 0
    launched = 0
    workspace_bytes = 100

    def __init__(self, *arguments: object) -> None:
        Launches.planned += 1

    def run(self, tensors: list[torch.Tensor], slots: bytes, stream: int) -> None:
        assert len(slots) == 7
        if len(tensors) < len(slots):
            raise MemoryError("no scratch memory")
        Launches.launched += 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> type[Launches]:
    Launches.planned = Launches.launched = 0
    native = SimpleNamespace(**{**vars(_native), "CudaPass": Launches})
    monkeypatch.setattr(_cuda, "_native", native)
    monkeypatch.setattr(_calls, "_kept", {})
    monkeypatch.setattr(_cuda, "_obstacles", {X.device: None})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return Launches


def test_plans_once_a_kind_of_call(launches: type[Launches]) -> None:
    x = pretend(X)

    def planned(call) -> int:
        before = launches.planned
        for _ in range(3):
            call()
        assert launches.launched
        return launches.planned - before

    conv = volup.conv_transpose3d
    assert planned(lambda: conv(x, W, B)) == 1
    assert planned(lambda: conv(x, W, B, [1, 1, 1], (0, 0, 0))) == 0
    assert planned(lambda: conv(x, W, B, torch.tensor(1))) == 0
    assert planned(lambda: conv(x, W, None)) == 1
    assert planned(lambda: conv(x, W, B, 2)) == 1
    assert planned(lambda: conv(x[:1], W, B)) == 1
    assert planned(lambda: conv(x[0], W, B)) == 1
    assert planned(lambda: conv(x.double(), W.double(), B.double())) == 1
    last = x.contiguous(memory_format=torch.channels_last_3d)
    assert planned(lambda: conv(last, W, B)) == 1
    assert planned(lambda: conv(x[:0], W, B)) == 0
    block = volup.conv_transpose3d_block
    assert planned(lambda: block(x, W, B)) == 0
    assert planned(lambda: block(x, W, B, activation="relu")) == 1
    assert planned(lambda: block(x, W, B, activation=("leaky_relu", 0.1))) == 1
    assert planned(lambda: block(x, W, B, activation=("leaky_relu", 0.2))) == 1
    assert planned(lambda: block(x, W, B, norm_groups=2)) == 1
    assert planned(lambda: block(x, W, B, norm_groups=2, eps=1e-3)) == 1
    assert planned(lambda: block(x, W, B, norm_groups=2, norm_bias=B)) == 1


def test_a_plan_hides_no_error(launches: type[Launches]) -> None:
    x = pretend(X)
    volup.conv_transpose3d_block(x, W, B, norm_groups=1, eps=1.0)
    for kind, change in [
        (TypeError, {"stride": True}),
        (TypeError, {"stride": (1, 1, True)}),
        (TypeError, {"stride": 1.0}),
        (TypeError, {"groups": True}),
        (TypeError, {"norm_groups": True}),
        (TypeError, {"norm_groups": 1.0}),
        (TypeError, {"weight": None}),
        (ValueError, {"precision": "fp8"}),
        (RuntimeError, {"weight": W.double()}),
        (RuntimeError, {"weight": W.to("meta")}),
        (RuntimeError, {"bias": B[None]}),
    ]:
        arguments = {"weight": W, "bias": B, "norm_groups": 1, "eps": 1.0, **change}
        with pytest.raises(kind):
            volup.conv_transpose3d_block(x, **arguments)
    freed = W.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="weight has no memory: its storage was freed"):
        volup.conv_transpose3d_block(x, freed, B, norm_groups=1, eps=1.0)
    assert launches.launched == 1


def test_a_changed_slope_is_seen(launches: type[Launches]) -> None:
    slope = torch.tensor(0.5)
    for value in (0.5, 0.25):
        slope.fill_(value)
        volup.conv_transpose3d_block(pretend(X), W, activation=("leaky_relu", slope))
    assert launches.planned == 2


def test_old_plans_are_dropped(launches: type[Launches], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_MOST_KEPT", 4)
    for stride in range(1, 10):
        volup.conv_transpose3d(pretend(X), W, B, stride)
    assert launches.planned == 9
    assert len(_calls._kept) == 4
    volup.conv_transpose3d(pretend(X), W, B, 9)
    assert launches.planned == 9
