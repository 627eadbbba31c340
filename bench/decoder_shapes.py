"""Convolutions of decoders, layer by layer: deep ones have many channels and few voxels."""

from typing import Any

# Batch, voxels along each axis, input and output channels, of each layer from the deepest on.
Layers = tuple[tuple[int, int, int, int], ...]

# Of nnU-Net, whose kernels are their stride.
NNUNET: Layers = (
    (2, 4, 320, 320),
    (2, 8, 320, 256),
    (2, 16, 256, 128),
    (2, 32, 128, 64),
    (2, 64, 64, 32),
)
# Of a generator with kernels of 4.
GENERATOR: Layers = (
    (16, 4, 512, 256),
    (16, 8, 256, 128),
    (16, 16, 128, 64),
    (16, 32, 64, 32),
    (16, 64, 32, 3),
)
# Of a U-Net as MONAI builds it, with kernels of 3.
MONAI: Layers = (
    (4, 6, 512, 256),
    (4, 12, 256, 128),
    (4, 24, 128, 64),
    (4, 48, 64, 32),
    (4, 96, 32, 2),
)


def decoder_cases(batch: int | None = None) -> list[dict[str, Any]]:
    """Cases as `volup._native` describes them, each of which doubles its volume.

    Of another batch than their own, if one is given.
    """
    cases = [
        *(_case(layer, kernel=2, padding=0, output_padding=0) for layer in NNUNET),
        *(_case(layer, kernel=4, padding=1, output_padding=0) for layer in GENERATOR),
        *(_case(layer, kernel=3, padding=1, output_padding=1) for layer in MONAI),
    ]
    if batch is not None:
        for case in cases:
            _, _, described = case["name"].partition(" ")
            case |= {"name": f"n{batch} {described}", "batch": batch}
    return cases


def _case(
    layer: tuple[int, int, int, int], kernel: int, padding: int, output_padding: int
) -> dict[str, Any]:
    batch, size, in_channels, out_channels = layer
    block = {
        "in_channels": in_channels,
        "out_channels": out_channels,
        "kernel_size": [kernel] * 3,
        "stride": [2] * 3,
        "padding": [padding] * 3,
        "output_padding": [output_padding] * 3,
        "dilation": [1] * 3,
        "groups": 1,
        "bias": True,
        **dict.fromkeys(("activation", "post_activation", "norm_groups")),
        "eps": 1e-5,
    }
    name = f"n{batch} {size}^3 {in_channels}>{out_channels} k{kernel} s2"
    return {"name": name, "block": block, "batch": batch, "input": [size] * 3}
