"""optimize and restore: what is replaced, what is not, and that nothing else changes."""

import copy
import pickle

import pytest
import torch
import torch.nn.utils.parametrizations as parametrizations
from torch import Tensor, nn

import volup


class Net(nn.Module):
    """A decoder as they come: a bare layer, a chain, a shared module, one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(4, 4, 2, 2)
        self.chain = nn.Sequential(
            nn.ConvTranspose3d(4, 6, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.GroupNorm(2, 6),
            nn.Conv3d(6, 4, 1),
            nn.ConvTranspose3d(4, 4, 3, padding=1),
            nn.InstanceNorm3d(4, affine=True),
            nn.LeakyReLU(0.1),
        )
        self.again = self.up
        self.plain = nn.Sequential(nn.Conv3d(4, 4, 1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.chain(self.up(x))
        return self.plain(self.again(x))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def input() -> Tensor:
    return torch.randn(1, 4, 3, 4, 5, generator=torch.Generator().manual_seed(1))


def run(model: nn.Module, input: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input)


def test_replaces_and_restores(net: Net, input: Tensor) -> None:
    expected = run(net, input)
    modules = list(net.modules())
    before = [dict(module.__dict__) for module in modules]
    classes = [type(module) for module in modules]
    state = net.state_dict(keep_vars=True)

    report = volup.optimize(net)
    assert [entry.name for entry in report.replaced] == ["up", "chain.0", "chain.4", "chain"]
    assert not report.skipped
    assert repr(report) == (
        "4 replaced, 0 skipped\n"
        "  replaced up: ConvTranspose3d\n"
        "  replaced chain.0: ConvTranspose3d\n"
        "  replaced chain.4: ConvTranspose3d\n"
        "  replaced chain: Sequential, fuses ConvTranspose3d+ReLU+GroupNorm, "
        "ConvTranspose3d+InstanceNorm3d+LeakyReLU"
    )
    assert type(net.up) is volup.nn.ConvTranspose3d
    assert type(net.chain) is volup.nn.Sequential
    assert list(net.modules()) == modules
    optimized = net.state_dict(keep_vars=True)
    assert list(optimized) == list(state)
    assert all(optimized[key] is state[key] for key in state)
    torch.testing.assert_close(run(net, input), expected, rtol=1e-4, atol=1e-4)

    volup.restore(net)
    assert [type(module) for module in net.modules()] == classes
    for module, attributes in zip(net.modules(), before, strict=True):
        assert module.__dict__ == attributes
    assert torch.equal(run(net, input), expected)


def test_repr_stays(net: Net) -> None:
    before = repr(net)
    volup.optimize(net)
    assert repr(net) == before


def test_a_second_call_changes_nothing(net: Net) -> None:
    volup.optimize(net)
    report = volup.optimize(net)
    assert repr(report) == "0 replaced, 0 skipped"
    volup.restore(net)
    assert type(net.up) is nn.ConvTranspose3d


def test_restore_leaves_layers_that_were_volups(input: Tensor) -> None:
    model = nn.ModuleList([volup.nn.ConvTranspose3d(4, 4, 3), volup.nn.Sequential()])
    volup.optimize(model)
    volup.restore(model)
    assert [type(module) for module in model] == [volup.nn.ConvTranspose3d, volup.nn.Sequential]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_can_be_restored(net: Net, input: Tensor, duplicate) -> None:
    expected = run(net, input)
    volup.optimize(net)
    other = duplicate(net)
    torch.testing.assert_close(run(other, input), expected, rtol=1e-4, atol=1e-4)
    volup.restore(other)
    assert type(other.chain) is nn.Sequential
    assert torch.equal(run(other, input), expected)
    assert type(net.chain) is volup.nn.Sequential


def test_the_model_itself(input: Tensor) -> None:
    model = nn.ConvTranspose3d(4, 4, 3)
    assert "(the model)" in repr(volup.optimize(model))
    assert type(model) is volup.nn.ConvTranspose3d


def test_state_loads_and_types_change(net: Net, input: Tensor) -> None:
    other = Net()
    volup.optimize(other)
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(run(other, input), run(net, input), rtol=1e-4, atol=1e-4)
    other.double()
    volup.restore(other)
    assert other.up.weight.dtype == torch.float64
    torch.testing.assert_close(
        run(other, input.double()), run(net.double(), input.double()), rtol=1e-10, atol=1e-10
    )


def test_an_optimized_model_trains_as_before(net: Net, input: Tensor) -> None:
    def gradients() -> list[Tensor]:
        net.zero_grad()
        net(input).square().sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    theirs = gradients()
    volup.optimize(net)
    ours = gradients()
    assert len(ours) == len(theirs) > 0
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


class Own(nn.ConvTranspose3d):
    pass


class OwnChain(nn.Sequential):
    pass


def hooked(register: str) -> nn.Module:
    conv = nn.ConvTranspose3d(4, 4, 3)
    getattr(conv, register)(lambda *args: None)
    return conv


def patched() -> nn.Module:
    conv = nn.ConvTranspose3d(4, 4, 3)
    conv.forward = lambda x: x
    return conv


def parametrized() -> nn.Module:
    return parametrizations.weight_norm(nn.ConvTranspose3d(4, 4, 3))


SKIPPED = [
    (lambda: hooked("register_forward_hook"), "has hooks"),
    (lambda: hooked("register_forward_pre_hook"), "has hooks"),
    (lambda: hooked("register_full_backward_hook"), "has hooks"),
    (lambda: hooked("register_full_backward_pre_hook"), "has hooks"),
    (patched, "its forward is replaced by another function"),
    (parametrized, "is parametrized"),
    (lambda: nn.utils.spectral_norm(nn.ConvTranspose3d(4, 4, 3)), "has hooks"),
    (lambda: Own(4, 4, 3), "Own, not a torch.nn.ConvTranspose3d"),
    (lambda: nn.LazyConvTranspose3d(4, 3), "LazyConvTranspose3d, not a torch.nn.ConvTranspose3d"),
    (lambda: nn.ConvTranspose3d(4, 4, 3, device="meta"), "is on device meta"),
    (lambda: nn.ConvTranspose3d(4, 4, 3, dtype=torch.complex64), "is of dtype torch.complex64"),
    (lambda: torch.ao.nn.quantized.ConvTranspose3d(4, 4, 3), "not a torch.nn.ConvTranspose3d"),
    (lambda: torch.jit.script(nn.ConvTranspose3d(4, 4, 3)), "not a torch.nn.ConvTranspose3d"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "reason"), SKIPPED)
def test_skips_and_says_why(make, reason: str) -> None:
    model = nn.ModuleDict({"layer": make()})
    before = type(model["layer"])
    report = volup.optimize(model)
    assert not report.replaced
    assert [entry.name for entry in report.skipped] == ["layer"]
    assert reason in report.skipped[0].text
    assert f"skipped layer: {report.skipped[0].text}" in repr(report)
    assert type(model["layer"]) is before
    volup.restore(model)
    assert type(model["layer"]) is before


def test_skips_chains_that_may_do_otherwise() -> None:
    conv, relu = nn.ConvTranspose3d(4, 4, 3), nn.ReLU()
    report = volup.optimize(OwnChain(conv, relu))
    assert [entry.name for entry in report.replaced] == ["0"]
    assert "OwnChain, which may use its layers otherwise" in report.skipped[0].text

    relu.register_forward_hook(lambda *args: None)
    volup.restore(conv)
    report = volup.optimize(nn.Sequential(conv, relu))
    assert report.skipped[0].text == "ReLU in it has hooks"

    chain = nn.Sequential(nn.ConvTranspose3d(4, 4, 3), nn.ReLU())
    chain.forward = lambda x: x
    report = volup.optimize(chain)
    assert report.skipped[0].text == "its forward is replaced by another function"


def test_a_shared_activation_keeps_its_work(input: Tensor) -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.ConvTranspose3d(4, 4, 3), relu, nn.Conv3d(4, 4, 1), relu)
    expected = run(model, input)
    volup.optimize(model)
    torch.testing.assert_close(run(model, input), expected, rtol=1e-4, atol=1e-4)
    assert relu(torch.tensor(-1.0)) == 0


def test_an_iterated_chain_gives_every_step(net: Net, input: Tensor) -> None:
    def steps(x: Tensor) -> list[Tensor]:
        results = []
        with torch.no_grad():
            for module in net.chain:
                x = module(x)
                results.append(x.clone())
        return results

    expected = steps(input)
    volup.optimize(net)
    for got, theirs in zip(steps(input), expected, strict=True):
        torch.testing.assert_close(got, theirs, rtol=1e-4, atol=1e-4)
