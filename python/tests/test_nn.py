"""The layers beside PyTorch's."""

import copy
import io
import pickle

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import volup


def close(got: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(got, theirs, rtol=1e-4, atol=1e-4, check_stride=True)


def pair(*args, **options) -> tuple[nn.ConvTranspose3d, volup.nn.ConvTranspose3d]:
    """PyTorch's layer and volup's, initialized alike."""
    torch.manual_seed(0)
    theirs = nn.ConvTranspose3d(*args, **options)
    torch.manual_seed(0)
    return theirs, volup.nn.ConvTranspose3d(*args, **options)


LAYERS = [
    ((4, 6, 3), {}),
    ((4, 6, 2, 2), {}),
    ((4, 6, (1, 2, 3), (1, 2, 1), (0, 1, 1), (0, 1, 0), 2, False, (1, 1, 2)), {}),
    ((4, 6, 3), {"stride": [2], "dtype": torch.float64}),
    ((4, 6, 3, 1, 0, 0, 1, True, 1, "zeros", "cpu", torch.float32), {}),
]


@pytest.mark.parametrize(("args", "options"), LAYERS)
def test_conv_is_pytorchs(args: tuple, options: dict) -> None:
    theirs, ours = pair(*args, **options)
    assert isinstance(ours, nn.ConvTranspose3d)
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    ours.load_state_dict(theirs.state_dict())
    input = torch.randn(2, 4, 3, 4, 5, dtype=ours.weight.dtype)
    with torch.no_grad():
        close(ours(input), theirs(input))
        close(ours(input[0]), theirs(input[0]))


def test_conv_shows_its_precision() -> None:
    assert repr(volup.nn.ConvTranspose3d(1, 1, 3, precision="ieee")).endswith(", precision='ieee')")


@pytest.mark.parametrize("size", [(6, 8, 10), [7, 8, 11], (2, 6, 7, 9, 10)])
def test_conv_takes_an_output_size(size) -> None:
    theirs, ours = pair(4, 6, 3, stride=2, padding=1)
    input = torch.randn(2, 4, 3, 4, 5)
    with torch.no_grad():
        try:
            expected = theirs(input, output_size=size)
        except ValueError:
            with pytest.raises(ValueError, match="requested an output size"):
                ours(input, output_size=size)
        else:
            close(ours(input, output_size=size), expected)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((2, 2, 3), {"groups": 0}),
        ((3, 2, 3), {"groups": 2}),
        ((2, 3, 3), {"groups": 2}),
        ((2, 2, 3), {"padding_mode": "reflect"}),
        ((2, 2, "a"), {}),
        ((2, 2, 1.5), {}),
        ((-1, 2, 3), {}),
    ],
)
def test_conv_refuses_what_pytorch_refuses(args: tuple, options: dict) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as theirs:
        nn.ConvTranspose3d(*args, **options)
    with pytest.raises(theirs.type) as ours:
        volup.nn.ConvTranspose3d(*args, **options)
    assert str(ours.value) == str(theirs.value)


def test_conv_refuses_unknown_precisions() -> None:
    with pytest.raises(ValueError, match="precision must be one of"):
        volup.nn.ConvTranspose3d(1, 1, 3, precision="fp8")


def test_layers_train() -> None:
    for ours in (
        volup.nn.ConvTranspose3d(4, 6, 3),
        volup.nn.ConvTranspose3dBlock(4, 6, 3, norm_groups=2, memory="save"),
    ):
        ours(torch.randn(1, 4, 3, 3, 3)).square().sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in ours.parameters())


def test_block_shows_and_checks_its_memory() -> None:
    assert "memory='save'" in repr(volup.nn.ConvTranspose3dBlock(1, 1, 3, memory="save"))
    with pytest.raises(ValueError, match="memory must be one of save, got 'less'"):
        volup.nn.ConvTranspose3dBlock(1, 1, 3, memory="less")


def duplicates(module: nn.Module):
    yield copy.deepcopy(module)
    yield copy.copy(module)
    yield pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


def block(**options) -> volup.nn.ConvTranspose3dBlock:
    torch.manual_seed(0)
    return volup.nn.ConvTranspose3dBlock(4, 6, 3, 2, **options)


BLOCKS = [
    {},
    {"activation": None},
    {"activation": "gelu", "post_activation": ("leaky_relu", 0.2)},
    {"norm_groups": 3},
    {"norm_groups": 3, "affine": False, "eps": 0.1, "post_activation": "hardswish"},
    {"norm_groups": 6, "bias": False, "dtype": torch.float64, "device": "cpu"},
]


@pytest.mark.parametrize("options", BLOCKS, ids=str)
def test_block_is_a_chain_of_pytorchs_layers(options: dict) -> None:
    ours = block(**options)
    torch.manual_seed(0)
    types = {key: options[key] for key in ("dtype", "device") if key in options}
    conv = nn.ConvTranspose3d(4, 6, 3, 2, bias=options.get("bias", True), **types)
    groups = options.get("norm_groups")
    keys = [f"conv.{key}" for key in conv.state_dict()]
    if groups:
        norm = nn.GroupNorm(
            groups, 6, options.get("eps", 1e-5), options.get("affine", True), **types
        )
        keys += [f"norm.{key}" for key in norm.state_dict()]
    assert list(ours.state_dict()) == keys
    for name, tensor in ours.state_dict().items():
        theirs = (conv if name.startswith("conv.") else norm).state_dict()[name[5:]]
        assert torch.equal(tensor, theirs)
    input = torch.randn(2, 4, 3, 4, 5, dtype=conv.weight.dtype)
    with torch.no_grad():
        y = reference.activate(options.get("activation", "relu"), conv(input))
        y = norm(y) if groups else y
        y = reference.activate(options.get("post_activation"), y)
        close(ours(input), y)
        for duplicate in duplicates(ours):
            assert torch.equal(duplicate(input), ours(input))
            assert repr(duplicate) == repr(ours)


def test_block_repr() -> None:
    assert repr(block(norm_groups=3)) == (
        "ConvTranspose3dBlock(\n"
        "  activation='relu', post_activation=None\n"
        "  (conv): ConvTranspose3d(4, 6, kernel_size=(3, 3, 3), stride=(2, 2, 2))\n"
        f"  (norm): {nn.GroupNorm(3, 6)!r}\n"
        ")"
    )


def test_block_loads_a_state() -> None:
    ours, other = block(norm_groups=3), volup.nn.ConvTranspose3dBlock(4, 6, 3, 2, norm_groups=3)
    assert str(other.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"
    input = torch.randn(2, 4, 3, 4, 5)
    with torch.no_grad():
        assert torch.equal(ours(input), other(input))


def test_block_moves_to_another_type() -> None:
    moved = block(norm_groups=3).to(torch.bfloat16)
    with torch.no_grad():
        assert moved(torch.randn(2, 4, 3, 4, 5).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"norm_groups": 4}, "out_channels must be divisible by norm_groups"),
        ({"norm_groups": 0}, "norm_groups must be positive, got 0"),
        ({"norm_groups": -3}, "norm_groups must be positive, got -3"),
        ({"norm_groups": 3, "eps": -1.0}, "eps must be finite and not negative, got -1"),
        ({"activation": "mish"}, 'got "mish"'),
        ({"post_activation": "mish"}, 'got "mish"'),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"groups": 4}, "out_channels must be divisible by groups"),
        ({"groups": 0}, "groups must be a positive integer"),
        ({"padding": -1}, "padding must not be negative, got -1"),
        ({"output_padding": 2}, "output_padding must be smaller than either stride or dilation"),
        ({"dilation": 0}, "dilation must be positive, got 0"),
    ],
)
def test_block_refuses(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        block(**options)


def test_block_refuses_wrong_kinds() -> None:
    with pytest.raises(TypeError):
        block(norm_groups=True)
    with pytest.raises(TypeError):
        block(activation=F.relu)


def chain(*modules: nn.Module) -> tuple[nn.Sequential, volup.nn.Sequential]:
    return nn.Sequential(*modules), volup.nn.Sequential(*modules)


CHAINS = [
    lambda: [nn.ConvTranspose3d(4, 6, 3), nn.ReLU(inplace=True)],
    lambda: [nn.ConvTranspose3d(4, 6, 3, bias=False), nn.GroupNorm(3, 6)],
    lambda: [nn.ConvTranspose3d(4, 6, 2, 2), nn.SiLU(), nn.GroupNorm(3, 6), nn.Hardswish()],
    lambda: [nn.ConvTranspose3d(4, 6, 3), nn.InstanceNorm3d(6), nn.LeakyReLU(inplace=True)],
    lambda: [nn.ConvTranspose3d(4, 6, 3), nn.InstanceNorm3d(6, affine=True), nn.GELU("tanh")],
    lambda: [nn.ConvTranspose3d(4, 6, 3), nn.GroupNorm(3, 6, affine=False), nn.Tanh(), nn.Tanh()],
    # Followed by something else, twice, and with what a block has no name for.
    lambda: [
        nn.Conv3d(4, 4, 1),
        nn.ConvTranspose3d(4, 6, 3, stride=2),
        nn.ReLU(),
        nn.GroupNorm(2, 6),
        nn.Conv3d(6, 4, 1),
        nn.ConvTranspose3d(4, 6, 3),
        nn.Mish(),
        nn.ConvTranspose3d(6, 2, 3),
        nn.Sigmoid(),
    ],
    # Norms that do not fit: of running statistics, of the batch.
    lambda: [nn.ConvTranspose3d(4, 6, 3), nn.InstanceNorm3d(6, track_running_stats=True).eval()],
    lambda: [nn.ConvTranspose3d(4, 6, 3), nn.BatchNorm3d(6).eval(), nn.ReLU()],
    lambda: [],
]


@pytest.mark.parametrize("make", CHAINS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_sequential_is_pytorchs(make, channels_last: bool) -> None:
    theirs, ours = chain(*make())
    input = torch.randn(2, 4, 3, 4, 5)
    if channels_last:
        input = input.to(memory_format=torch.channels_last_3d)
    with torch.no_grad():
        close(ours(input), theirs(input))
        for end in range(len(ours)):
            assert type(ours[:end]) is volup.nn.Sequential
            close(ours[:end](input), theirs[:end](input))
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_sequential_without_a_batch() -> None:
    theirs, ours = chain(nn.ConvTranspose3d(4, 6, 3), nn.ReLU(), nn.InstanceNorm3d(6))
    input = torch.randn(4, 3, 4, 5)
    with torch.no_grad():
        close(ours(input), theirs(input))
    # What PyTorch's group norm makes of it is another thing; whatever it is, it stays so.
    theirs, ours = chain(nn.ConvTranspose3d(4, 6, 3), nn.GroupNorm(1, 5))
    with torch.no_grad():
        close(ours(input), theirs(input))


def test_sequential_calls_hooks() -> None:
    _, ours = chain(nn.ConvTranspose3d(4, 6, 3), nn.ReLU(), nn.GroupNorm(2, 6))
    seen = []
    input = torch.randn(2, 4, 3, 4, 5)
    with torch.no_grad():
        fused = ours(input)
        handle = ours[1].register_forward_hook(lambda module, args, output: seen.append(output))
        hooked = ours(input)
        handle.remove()
        assert len(seen) == 1
        assert seen[0].min() == 0
        close(hooked, fused)
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: seen.append(type(module))
        )
        ours(input)
        handle.remove()
    assert nn.GroupNorm in seen


def test_sequential_with_wide_norm_parameters() -> None:
    modules = [nn.ConvTranspose3d(4, 6, 3).bfloat16(), nn.ReLU(), nn.GroupNorm(2, 6)]
    theirs, ours = chain(*modules)
    input = torch.randn(2, 4, 3, 4, 5).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(ours(input), theirs(input), rtol=2e-2, atol=2e-2)


def test_sequential_under_autocast() -> None:
    theirs, ours = chain(nn.ConvTranspose3d(4, 6, 3), nn.ReLU(), nn.GroupNorm(2, 6))
    input = torch.randn(2, 4, 3, 4, 5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(input), theirs(input), rtol=2e-2, atol=5e-2)


def test_sequential_refuses_to_norm_single_voxels_as_pytorch_does() -> None:
    for norm in (nn.InstanceNorm3d(6), nn.GroupNorm(6, 6)):
        theirs, ours = chain(nn.ConvTranspose3d(4, 6, 1), norm)
        for batch in (1, 2):
            input = torch.randn(batch, 4, 1, 1, 1)
            with torch.no_grad():
                try:
                    expected = theirs(input)
                except ValueError:
                    with pytest.raises(ValueError, match="more than 1"):
                        ours(input)
                else:
                    close(ours(input), expected)


def decoder(**options) -> volup.nn.Decoder:
    torch.manual_seed(0)
    return volup.nn.Decoder(
        volup.nn.ConvTranspose3dBlock(1, 4, 3, 1, 1, norm_groups=2),
        volup.nn.ConvTranspose3dBlock(4, 1, 4, 2, 1, activation=None),
        **options,
    )


def test_decoder_keys() -> None:
    assert list(decoder().state_dict()) == [
        "blocks.0.conv.weight",
        "blocks.0.conv.bias",
        "blocks.0.norm.weight",
        "blocks.0.norm.bias",
        "blocks.1.conv.weight",
        "blocks.1.conv.bias",
    ]
    assert "skip='trilinear', normalize=None" in repr(decoder(skip="trilinear"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("skip", [None, "trilinear"])
@pytest.mark.parametrize("normalize", [None, "max"])
def test_decoder_is_its_blocks_and_what_surrounds_them(dtype, skip, normalize) -> None:
    model = decoder(skip=skip, normalize=normalize).to(dtype)
    input = (7 * torch.randn(2, 1, 4, 5, 6)).to(dtype)
    input[0] *= 3
    with torch.no_grad():
        x = input.double()
        scale = torch.ones(2, 1, 1, 1, 1)
        if normalize:
            scale = x.abs().amax(dim=(1, 2, 3, 4), keepdim=True)
        y = model.blocks[1](model.blocks[0]((x / scale).to(dtype))).double()
        if skip:
            y = y + F.interpolate(x / scale, scale_factor=2, mode="trilinear", align_corners=False)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        got = model(input)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), y * scale, rtol=tolerance, atol=20 * tolerance)
        single = model(input[0])
        torch.testing.assert_close(single, got[0])


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_decoder_leaves_a_scale_that_is_none(value: float) -> None:
    input = torch.zeros(1, 1, 2, 2, 2)
    input[0, 0, 0, 0, 0] = value
    with torch.no_grad():
        got = decoder(normalize="max")(input)
        torch.testing.assert_close(got, decoder()(input), equal_nan=True)


def test_decoder_refuses() -> None:
    block = volup.nn.ConvTranspose3dBlock
    with pytest.raises(ValueError, match="at least one block"):
        volup.nn.Decoder()
    with pytest.raises(TypeError, match=r"block 1 must be a volup\.nn\.ConvTranspose3dBlock, not"):
        volup.nn.Decoder(block(1, 1, 3), nn.ConvTranspose3d(1, 1, 3))
    with pytest.raises(ValueError, match=r"as many in_channels .* \(2\), got 3"):
        volup.nn.Decoder(block(1, 2, 3), block(3, 1, 3))
    with pytest.raises(ValueError, match="as many out_channels as in_channels"):
        volup.nn.Decoder(block(1, 2, 3), skip="trilinear")
    with pytest.raises(ValueError, match="skip must be one of trilinear, got 'cubic'"):
        volup.nn.Decoder(block(1, 1, 3), skip="cubic")
    with pytest.raises(ValueError, match="normalize must be one of max, got 'mean'"):
        volup.nn.Decoder(block(1, 1, 3), normalize="mean")
