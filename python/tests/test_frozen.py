"""Weights that a model is said to keep: packed once, by the CPU in a GPU's place and on GPUs."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from stand_in import CpuPass, cuda_kernels, pretend
from torch import Tensor

import volup
from volup import frozen

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CpuPass]]:
    monkeypatch.setattr(frozen, "_captured", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with cuda_kernels(monkeypatch, None):
        yield CpuPass


def layer(**options: int) -> volup.nn.ConvTranspose3d:
    torch.manual_seed(0)
    return volup.nn.ConvTranspose3d(3, 4, 2, **options)


def volume(*shape: int) -> Tensor:
    return pretend(torch.randn(*shape))


@torch.no_grad()
def results(model: torch.nn.Module, *inputs: Tensor) -> list[Tensor]:
    return [model(x).as_subclass(Tensor) for x in inputs]


def test_a_frozen_weight_is_packed_once(passes: type[CpuPass]) -> None:
    model = layer()
    inputs = volume(1, 3, 4, 5, 6), volume(2, 3, 3, 3, 3)
    expected = results(model, *inputs)
    assert not passes.packed
    volup.freeze(model)
    for _ in range(2):
        for got, want in zip(results(model, *inputs), expected, strict=True):
            assert torch.equal(got, want)
    assert len(passes.packed) == 1
    # Said twice is said once.
    volup.freeze(model)
    results(model, *inputs)
    assert len(passes.packed) == 1


def test_a_counted_change_is_packed_anew(passes: type[CpuPass]) -> None:
    model, x = layer(), volume(1, 3, 4, 5, 6)
    volup.freeze(model)
    results(model, x)
    changes: list[Callable[[], object]] = [
        lambda: model.weight.mul_(2),
        lambda: model.load_state_dict({**model.state_dict(), "weight": model.weight + 1}),
        lambda: setattr(model.weight, "data", model.weight.data.clone() - 3),
    ]
    for packed, change in enumerate(changes, 2):
        with torch.no_grad():
            change()
        [got] = results(model, x)
        assert torch.equal(got, results(copy.deepcopy(model), x)[0])
        assert len(passes.packed) == packed


def test_what_is_not_counted_waits_for_unfreezing(passes: type[CpuPass]) -> None:
    model, x = layer(), volume(1, 3, 4, 5, 6)
    volup.freeze(model)
    [before] = results(model, x)
    model.weight.data.zero_()
    assert torch.equal(results(model, x)[0], before)
    volup.unfreeze(model)
    assert not torch.equal(results(model, x)[0], before)
    assert len(passes.packed) == 1
    volup.unfreeze(model)


def test_each_way_of_packing_has_its_own(passes: type[CpuPass]) -> None:
    model, x = layer(), volume(1, 3, 4, 5, 6)
    volup.freeze(model)
    results(model, x)
    model.double()
    [got] = results(model, x.double())
    assert got.dtype == torch.float64
    assert len(passes.packed) == 2


def test_a_capture_packs_nothing_and_keeps_what_it_uses(
    passes: type[CpuPass], monkeypatch: pytest.MonkeyPatch
) -> None:
    def capturing(is_it: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_it)

    model, x = layer(), volume(1, 3, 4, 5, 6)
    volup.freeze(model)
    capturing(True)
    [expected] = results(model, x)
    assert not passes.packed
    assert not frozen._captured
    capturing(False)
    results(model, x)
    assert len(passes.packed) == 1
    assert not frozen._captured
    capturing(True)
    assert torch.equal(results(model, x)[0], expected)
    volup.unfreeze(model)
    assert list(frozen._captured) == passes.packed


def test_nothing_else_knows(passes: type[CpuPass]) -> None:
    model, x = layer(), volume(1, 3, 4, 5, 6)
    state = pickle.dumps(model)
    known = len(frozen.weights)
    volup.freeze(model)
    results(model, x)
    assert pickle.dumps(model) == state
    results(copy.deepcopy(model), x)
    assert len(passes.packed) == 1
    assert len(frozen.weights) == known + 1
    del model
    gc.collect()
    assert len(frozen.weights) == known


def test_layers_of_all_kinds(passes: type[CpuPass]) -> None:
    chain = torch.nn.Sequential(
        torch.nn.ConvTranspose3d(3, 4, 2), torch.nn.ReLU(), torch.nn.GroupNorm(2, 4)
    )
    parametrized = torch.nn.utils.parametrizations.weight_norm(layer())
    model = torch.nn.ModuleList(
        [
            layer(),
            volup.nn.ConvTranspose3dBlock(3, 4, 2, norm_groups=2),
            chain,
            parametrized,
            torch.nn.Conv3d(3, 4, 2),
        ]
    )
    volup.optimize(model)
    volup.freeze(model)
    x = volume(1, 3, 4, 5, 6)
    for module in model:
        results(module, x)
    # Not the weight that is computed anew.
    assert len(passes.packed) == 3
    volup.unfreeze(model)


def test_a_weight_by_itself(passes: type[CpuPass]) -> None:
    x, w = volume(1, 3, 4, 5, 6), torch.randn(3, 4, 2, 2, 2)
    volup.freeze(w)
    for _ in range(2):
        volup.conv_transpose3d(x, w)
        # Another tensor of the same memory is another weight.
        volup.conv_transpose3d(x, w.view_as(w))
    assert len(passes.packed) == 1
    for refused in (volup.freeze, volup.unfreeze):
        with pytest.raises(TypeError, match=r"must be torch\.nn\.Module or Tensor"):
            refused([w])  # type: ignore[arg-type]


def test_training_goes_on(passes: type[CpuPass]) -> None:
    model, x = layer(), volume(1, 3, 4, 5, 6)
    volup.freeze(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        assert torch.equal(results(model, x)[0], results(copy.deepcopy(model), x)[0])


# --- On GPUs --------------------------------------------------------------------------------------

# Layers of each family that multiplies packed weights, and of such as multiply them as they lie.
LAYERS = {
    "strided": ((64, 48, 3), {"stride": 2, "padding": 1, "output_padding": 1}, (2, 64, 9, 10, 12)),
    "deep": ((512, 256, 4), {"stride": 2, "padding": 1}, (2, 512, 4, 4, 4)),
    "dense": ((32, 48, 3), {"padding": 1}, (2, 32, 12, 13, 16)),
    "grouped": ((64, 64, 3), {"groups": 4, "stride": 2}, (2, 64, 6, 7, 8)),
    "shuffled": ((64, 32, 2), {"stride": 2}, (2, 64, 8, 8, 8)),
}
KINDS = {
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "bf16": (torch.bfloat16, None),
    "f16": (torch.float16, None),
}


def on_gpu(name: str, kind: str, norm_groups: int | None = 8) -> tuple[torch.nn.Module, Tensor]:
    sizes, options, shape = LAYERS[name]
    dtype, precision = KINDS[kind]
    torch.manual_seed(0)
    model = volup.nn.ConvTranspose3dBlock(
        *sizes, **options, activation="relu", norm_groups=norm_groups, precision=precision
    )
    return model.to("cuda", dtype), torch.randn(shape, device="cuda", dtype=dtype)


@gpu
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("norm_groups", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_bit_differs(name: str, kind: str, norm_groups: int | None, last: bool) -> None:
    model, x = on_gpu(name, kind, norm_groups)
    if last:
        x = x.to(memory_format=torch.channels_last_3d)
    inputs = x, x[:1].contiguous(), x * 1e3
    expected = results(model, *inputs)
    volup.freeze(model)
    for _ in range(2):
        for got, want in zip(results(model, *inputs), expected, strict=True):
            assert torch.equal(got, want)
    packs = any(forms.packed for forms in frozen.weights.values())
    volup.unfreeze(model)
    assert packs or name in ("grouped", "shuffled")


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_kernels_cannot_multiply_are_seen(kind: str) -> None:
    for special in (float("inf"), float("nan"), 1e-20):
        model, x = on_gpu("strided", kind, None)
        with torch.no_grad():
            model.conv.weight[3, 5, 1, 1, 1] = special
            model.conv.weight[:, 7] *= 1e-3
        [expected] = results(model, x)
        volup.freeze(model)
        [got] = results(model, x)
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@gpu
def test_a_graph_of_a_frozen_layer_outlives_it() -> None:
    model, x = on_gpu("strided", "tf32")
    [expected] = results(model, x)
    volup.freeze(model)
    results(model, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        got = model(x)
    volup.unfreeze(model)
    # What was given back would be taken again.
    taken = [torch.randn(1 << 18, device="cuda") for _ in range(64)]
    got.zero_()
    graph.replay()
    assert torch.equal(got, expected)
    del taken


@gpu
def test_frozen_on_two_streams() -> None:
    model, x = on_gpu("deep", "bf16")
    [expected] = results(model, x)
    volup.freeze(model)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    got = []
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 2]):
            got += results(model, x)
    torch.cuda.synchronize()
    assert all(torch.equal(each, expected) for each in got)
