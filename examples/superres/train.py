"""Trains the super-resolution decoder on the training part of one volume.

    python train.py VOLUME --out decoder.safetensors
    python train.py VOLUME --modules torch --device cuda --out decoder.safetensors

VOLUME is the original template as NIfTI or as an .npy array [z, y, x]. The held-out part (see
volume.py) is cut off before anything else is done with it. The decoder is made of volup's layers or
of PyTorch's, which take the same weights and give the same losses: `--curve losses.png` trains both
and draws them.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import volume as volumes

# Most of the depth lies before the stride-2 step, where a voxel costs an eighth of what it costs
# after it. Columns: in, out, kernel, stride, padding, groups of the norm (None: a bare convolution,
# with neither activation nor norm).
LAYERS = [
    (1, 24, 3, 1, 1, 4),
    (24, 24, 3, 1, 1, 4),
    (24, 24, 3, 1, 1, 4),
    (24, 16, 4, 2, 1, 4),
    (16, 1, 3, 1, 1, None),
]

# Half voxels of empty space put in front of the training part. Group norm takes its statistics over
# all voxels of the input, so the share of background in training must be about that of the whole
# volume, over which the decoder runs in the end: 22 % of that is brain, of the training part 27 %.
EMPTY_ROWS = 16


# Smooth: ReLU's slope jumps, so that a rounding may change a gradient by far more than itself, and
# training with it goes another way on every machine.
ACTIVATION = "silu"


class Block(nn.Module):
    """ConvTranspose3d -> SiLU -> GroupNorm, or the convolution alone."""

    def __init__(self, inputs, outputs, kernel, stride, padding, groups):
        super().__init__()
        self.conv = nn.ConvTranspose3d(inputs, outputs, kernel, stride, padding)
        self.norm = nn.GroupNorm(groups, outputs) if groups else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.norm(functional.silu(x)) if self.norm else x


def volup_block(inputs, outputs, kernel, stride, padding, groups) -> nn.Module:
    """The same as one layer of volup's; its weights begin as those of `Block` do."""
    import volup  # here, so that training with PyTorch's layers needs no more than PyTorch

    activation = ACTIVATION if groups else None
    return volup.nn.ConvTranspose3dBlock(
        inputs, outputs, kernel, stride, padding, activation=activation, norm_groups=groups
    )


MODULES = {"volup": volup_block, "torch": Block}


def describe(block: nn.Module, name: str) -> dict:
    """A block's entry in the decoder file."""
    conv, norm = block.conv, block.norm
    return {
        "name": name,
        "in_channels": conv.in_channels,
        "out_channels": conv.out_channels,
        "kernel_size": list(conv.kernel_size),
        "stride": list(conv.stride),
        "padding": list(conv.padding),
        "output_padding": list(conv.output_padding),
        "groups": conv.groups,
        "dilation": list(conv.dilation),
        "bias": conv.bias is not None,
        "activation": ACTIVATION if norm else None,
        "norm_groups": norm.num_groups if norm else None,
        "eps": norm.eps if norm else 1e-5,
        "affine": norm.affine if norm else True,
        "post_activation": None,
    }


class Decoder(nn.Module):
    """Trilinear upsampling by two, plus what the chain of blocks adds to it."""

    def __init__(self, layers=LAYERS, modules="volup"):
        super().__init__()
        self.blocks = nn.ModuleList(MODULES[modules](*layer) for layer in layers)
        # The decoder starts out as the trilinear upsampling itself and learns only what that lacks.
        nn.init.zeros_(self.blocks[-1].conv.weight)
        nn.init.zeros_(self.blocks[-1].conv.bias)
        # The last convolution sums hundreds of normalised values into a residual of a few per cent.
        # With a norm of unit scale before it, the first steps overshoot; with ReLU whole channels
        # died of it and the decoder stayed at trilinear for good.
        nn.init.constant_(self.blocks[-2].norm.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        skip = functional.interpolate(x, scale_factor=2, mode="trilinear", align_corners=False)
        for block in self.blocks:
            x = block(x)
        return skip + x

    def save(self, path: Path) -> None:
        """Writes the weights, and in the metadata what `volup` needs to rebuild the chain."""
        from safetensors.torch import save_file

        description = {
            "format": "volup-decoder",
            "version": 1,
            "skip": "trilinear",
            "normalize": "max",
            "blocks": [describe(b, f"blocks.{i}") for i, b in enumerate(self.blocks)],
        }
        tensors = {k: v.detach().float().cpu().contiguous() for k, v in self.state_dict().items()}
        save_file(tensors, path, metadata={"volup": json.dumps(description)})


def sample(part: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
    """One training pair (half, original), both divided by the half's maximum as at run time.

    The pair covers the whole training part at once, since small patches would have other group norm
    statistics than a whole volume. One volume is little data, so it is varied in ways that leave
    2x2x2 averaging as it is: where the cubes begin, mirror images, order of the axes, contrast.
    """
    begin = [rng.randrange(2) for _ in range(3)]
    # Two voxels less than the part, rounded to even: room for the shift, at one and the same size.
    end = [b + (size - 1) // 2 * 2 for b, size in zip(begin, part.shape, strict=True)]
    full = part[tuple(slice(b, e) for b, e in zip(begin, end, strict=True))]
    full = full ** rng.uniform(0.8, 1.25)
    full = full.flip([axis for axis in range(3) if rng.random() < 0.5])
    full = full.permute(rng.sample(range(3), 3))[None, None].contiguous()
    half = functional.avg_pool3d(full, 2)
    return half / half.max(), full / half.max()


def train(
    volume,
    device: str,
    steps: int,
    seed: int,
    layers=LAYERS,
    modules="volup",
    size=None,
    dtype=torch.float32,
) -> tuple[Decoder, list[float]]:
    """The trained decoder and the loss of each step.

    With a size no more than as many voxels are trained on, in the middle of each axis.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    if device == "cuda":
        torch.backends.cudnn.benchmark = True  # few shapes, and each of them very often

    part = torch.from_numpy(volume[:, : 2 * volumes.TRAIN_UNTIL].copy()).to(device, dtype)
    part = functional.pad(part / part.max(), (0, 0, 2 * EMPTY_ROWS, 0))
    if size is not None:
        middle = [slice(max(0, (axis - size) // 2), (axis + size) // 2) for axis in part.shape]
        part = part[tuple(middle)]

    decoder = Decoder(layers, modules).to(device, dtype)
    # At three times the rate the result is worse, and roundings grow to per cents of the loss.
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-3, total_steps=steps, pct_start=0.1
    )
    losses = []
    began = time.monotonic()
    for step in range(1, steps + 1):
        half, full = sample(part, rng)
        # Charbonnier, a smooth L1. A squared error alone would be ruled by the few voxels on the
        # brain's rim; below 1 % of the maximum it is squared all the same, as PSNR is.
        error = decoder(half) - full
        loss = (error.square() + 0.01**2).sqrt().mean() - 0.01
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        # The rim can make single steps large early on, while the norms' scales still move.
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % max(1, steps // 20) == 0:
            psnr = -10 * error.detach().square().mean().log10().item()
            seconds = time.monotonic() - began
            print(f"step {step:5d}  loss {losses[-1]:.6f}  PSNR {psnr:.2f} dB  {seconds:.0f} s")
    return decoder, losses


def farthest_apart(ours: list[float], theirs: list[float]) -> float:
    """The largest difference of two curves at any step, as a share of the loss."""
    return max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draws the loss of each step, and below how far the curves are apart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained"
    )
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        above.plot(range(1, len(losses) + 1), losses, style, label=name)
    above.set_yscale("log")
    above.set_ylabel("loss")
    above.legend()
    ours, theirs = curves.values()
    apart = [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    below.plot(range(1, len(apart) + 1), apart, color="gray")
    below.set_yscale("log")
    below.set_ylabel("relative difference")
    below.set_xlabel("step")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("volume", type=Path, help="the original volume, .nii.gz or .npy [z, y, x]")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "decoder.safetensors")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--modules", choices=list(MODULES), default="volup")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--size", type=int, help="train on so many voxels in the middle of each axis"
    )
    parser.add_argument(
        "--curve", type=Path, help="train with both kinds of modules, draw the losses"
    )
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument(
        "--precision",
        choices=["ieee", "tf32"],
        help="how CUDA convolves float32, with either kind of modules; else as PyTorch's flags say",
    )
    args = parser.parse_args()
    if args.precision:
        torch.backends.cudnn.allow_tf32 = args.precision == "tf32"

    volume, _ = volumes.read(args.volume)
    volume = volumes.crop_to_even(volume)

    def run(modules: str) -> tuple[Decoder, list[float]]:
        dtype = getattr(torch, args.dtype)
        options = {"modules": modules, "size": args.size, "dtype": dtype}
        return train(volume, args.device, args.steps, args.seed, **options)

    decoder, losses = run(args.modules)
    decoder.save(args.out)
    print(f"{args.out}: {args.out.stat().st_size / 1024:.0f} KiB")
    if args.curve:
        other = next(name for name in MODULES if name != args.modules)
        print(f"now with {other}'s layers")
        curves = {args.modules: losses, other: run(other)[1]}
        draw(curves, args.curve)
        apart = farthest_apart(curves["volup"], curves["torch"])
        print(f"{args.curve}: the losses are at most {apart:.1e} of themselves apart")


if __name__ == "__main__":
    main()
