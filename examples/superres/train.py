"""Trains the super-resolution decoder on the training part of one volume, with plain PyTorch.

    python train.py VOLUME --device cuda --out decoder.safetensors

VOLUME is the original template as NIfTI or as an .npy array [z, y, x]. The held-out part (see
volume.py) is cut off before anything else is done with it.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
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


class Block(nn.Module):
    """ConvTranspose3d -> ReLU -> GroupNorm, or the convolution alone."""

    def __init__(self, inputs, outputs, kernel, stride, padding, groups):
        super().__init__()
        self.conv = nn.ConvTranspose3d(inputs, outputs, kernel, stride, padding)
        self.norm = nn.GroupNorm(groups, outputs) if groups else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.norm(functional.relu(x)) if self.norm else x

    def describe(self, name: str) -> dict:
        """This block's entry in the decoder file."""
        conv, norm = self.conv, self.norm
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
            "activation": "relu" if norm else None,
            "norm_groups": norm.num_groups if norm else None,
            "eps": norm.eps if norm else 1e-5,
            "affine": norm.affine if norm else True,
            "post_activation": None,
        }


class Decoder(nn.Module):
    """Trilinear upsampling by two, plus what the chain of blocks adds to it."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        self.blocks = nn.ModuleList(Block(*layer) for layer in layers)
        # The decoder starts out as the trilinear upsampling itself and learns only what that lacks.
        nn.init.zeros_(self.blocks[-1].conv.weight)
        nn.init.zeros_(self.blocks[-1].conv.bias)
        # The last convolution sums hundreds of normalised values into a residual of a few per cent.
        # With a norm of unit scale before it, the first steps overshoot so far that whole channels
        # die in their ReLU and the decoder stays at trilinear for good.
        nn.init.constant_(self.blocks[-2].norm.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        skip = functional.interpolate(x, scale_factor=2, mode="trilinear", align_corners=False)
        for block in self.blocks:
            x = block(x)
        return skip + x

    def save(self, path: Path) -> None:
        """Writes the weights, and in the metadata what `volup` needs to rebuild the chain."""
        description = {
            "format": "volup-decoder",
            "version": 1,
            "skip": "trilinear",
            "normalize": "max",
            "blocks": [b.describe(f"blocks.{i}") for i, b in enumerate(self.blocks)],
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


def train(volume, device: str, steps: int, seed: int, layers=LAYERS) -> Decoder:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    torch.backends.cudnn.benchmark = True  # few shapes, and each of them very often

    part = torch.from_numpy(volume[:, : 2 * volumes.TRAIN_UNTIL].copy()).to(device)
    part = functional.pad(part / part.max(), (0, 0, 2 * EMPTY_ROWS, 0))

    decoder = Decoder(layers).to(device)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1
    )
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
        if step % max(1, steps // 20) == 0:
            psnr = -10 * error.detach().square().mean().log10().item()
            seconds = time.monotonic() - began
            print(f"step {step:5d}  loss {loss.item():.6f}  PSNR {psnr:.2f} dB  {seconds:.0f} s")
    return decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("volume", type=Path, help="the original volume, .nii.gz or .npy [z, y, x]")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "decoder.safetensors")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    volume, _ = volumes.read(args.volume)
    decoder = train(volumes.crop_to_even(volume), args.device, args.steps, args.seed)
    decoder.save(args.out)
    print(f"{args.out}: {args.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
