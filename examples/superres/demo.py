"""Super-resolution of a real MRI with `volup run`: 2 mm voxels in, 1 mm voxels out.

    python demo.py --volup target/release/volup --cache .demo --out .demo

Halves the ICBM template, lets `volup` bring it back to full size, and compares the result with the
original on the part that training never saw. Exits with 1 if it is not clearly better than
trilinear upsampling in both PSNR and SSIM.
"""

import argparse
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure  # used directly: with no pyplot, no display is asked for
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from skimage.morphology import erosion

import volume as volumes
from fetch import fetch

# By how much the decoder must win. Not by nothing: were its blocks lost, what is left is trilinear
# upsampling, which rounding alone can put a hair ahead of itself.
LEAST_PSNR_GAIN = 1.0
LEAST_SSIM_GAIN = 0.001

DECODER = Path(__file__).resolve().parent / "decoder.safetensors"


def upsample_trilinear(volume: np.ndarray) -> np.ndarray:
    """Twice the size along every axis, as torch's `interpolate` without aligned corners does it:
    a new voxel lies a quarter of an old one off its centre, so it takes 3/4 of that old voxel and
    1/4 of the next one on its own side; the border voxels repeat themselves outwards."""
    for axis in range(volume.ndim):
        rows = np.moveaxis(volume, axis, 0)
        before = np.concatenate([rows[:1], rows[:-1]])
        after = np.concatenate([rows[1:], rows[-1:]])
        pairs = np.stack([0.75 * rows + 0.25 * before, 0.75 * rows + 0.25 * after], axis=1)
        volume = np.moveaxis(pairs.reshape(-1, *rows.shape[1:]), 0, axis)
    return volume


def held_out(volume: np.ndarray) -> np.ndarray:
    return volume[:, 2 * volumes.HELD_OUT_FROM :]


class Score(NamedTuple):
    """How close a volume comes to the original on the held-out part."""

    psnr: float
    ssim: float
    psnr_inside: float


def score(volume: np.ndarray, original: np.ndarray) -> Score:
    """PSNR in dB and SSIM, both against the maximum of the whole original.

    The template has no skull, so its rim is a hard edge against zero, where most of the squared
    error lies. PSNR more than three voxels inside the rim tells how the tissue itself fares.
    """
    truth, guess = held_out(original), held_out(volume)
    inside = erosion(truth > 0, np.ones((7, 7, 7)))
    limit = float(original.max())
    return Score(
        float(peak_signal_noise_ratio(truth, guess, data_range=limit)),
        float(structural_similarity(truth, guess, data_range=limit)),
        float(peak_signal_noise_ratio(truth[inside], guess[inside], data_range=limit)),
    )


def brain_box(plane: np.ndarray, margin: int = 6) -> tuple[slice, slice]:
    """The rectangle of the plane that holds everything but empty background."""
    spans = []
    for axis in (0, 1):
        filled = np.flatnonzero(plane.any(axis=1 - axis))
        spans.append(slice(max(filled[0] - margin, 0), filled[-1] + margin + 1))
    return spans[0], spans[1]


def draw(
    path: Path,
    original: np.ndarray,
    half: np.ndarray,
    candidates: dict[str, np.ndarray],
    scores: dict[str, Score],
) -> None:
    """One coronal slice from the middle of the held-out brain: images above, errors below."""
    filled = np.flatnonzero(held_out(original).any(axis=(0, 2)))
    y = 2 * volumes.HELD_OUT_FROM + int(filled[0] + filled[-1]) // 2
    box = brain_box(original[:, y])
    truth = original[:, y][box]
    # Every voxel drawn as the 2x2 it covers, so that the input lines up with all else.
    coarse = half[:, y // 2].repeat(2, axis=0).repeat(2, axis=1)[box]
    images = {name: volume[:, y][box] for name, volume in candidates.items()}
    errors = {name: np.abs(image - truth) for name, image in images.items()}
    # The few voxels beyond it, all on the rim, would darken the rest of the scale.
    error_limit = float(np.percentile(np.stack(list(errors.values())), 99.5))
    gray = {"cmap": "gray", "vmin": 0, "vmax": float(original.max()), "origin": "lower"}
    heat = {"cmap": "inferno", "vmin": 0, "vmax": error_limit, "origin": "lower"}

    with rc_context({"font.size": 12, "axes.titlesize": 13}):
        columns = 1 + len(images)
        height = 2 * 4.0 * truth.shape[0] / truth.shape[1] + 2.0
        figure = Figure(figsize=(4.0 * columns + 0.8, height), layout="constrained")
        axes = figure.subplots(2, columns)
        for axis in axes.flat:
            axis.set_axis_off()
        axes[0, 0].imshow(truth, **gray)
        axes[0, 0].set_title("original\n1 mm")
        axes[1, 0].imshow(coarse, **gray)
        axes[1, 0].set_title("input, 2 mm")
        for column, (name, image) in enumerate(images.items(), start=1):
            axes[0, column].imshow(image, **gray)
            psnr, ssim = scores[name].psnr, scores[name].ssim
            axes[0, column].set_title(f"{name}\nPSNR {psnr:.2f} dB, SSIM {ssim:.4f}")
            shown = axes[1, column].imshow(errors[name], **heat)
            axes[1, column].set_title(f"{name}, absolute error")
        bar = figure.colorbar(shown, ax=axes[1, :], pad=0.01, aspect=14, extend="max")
        bar.set_label(f"error, of {original.max():.0f}")
        figure.suptitle(
            f"ICBM 2009a T1 template, 2 mm to 1 mm: coronal slice y = {y} of the held-out part\n"
            "(PSNR and SSIM are of the whole held-out part)",
            fontsize=14,
        )
        figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--volup", type=Path, required=True, help="the built command-line program")
    parser.add_argument("--cache", type=Path, required=True, help="folder that keeps the template")
    parser.add_argument("--out", type=Path, required=True, help="folder for volumes and figure")
    parser.add_argument("--decoder", type=Path, default=DECODER)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    original, affine = volumes.read(fetch(args.cache))
    original = volumes.crop_to_even(original)
    half = volumes.halve(original)
    half_path, up_path = args.out / "half.nii.gz", args.out / "up.nii.gz"
    volumes.write(half_path, half, volumes.halve_affine(affine))

    # An absolute path, since a bare file name would be looked up in PATH.
    program = os.path.abspath(args.volup)
    command = [program, "run", "--decoder", str(args.decoder), str(half_path), str(up_path)]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"demo: `{' '.join(command)}` failed")

    up, up_affine = volumes.read(up_path)
    if up.shape != original.shape:
        raise SystemExit(f"demo: volup wrote sizes {up.shape}, expected {original.shape}")
    if not np.allclose(up_affine, affine, atol=1e-4):
        raise SystemExit(f"demo: volup wrote the affine\n{up_affine}\nexpected\n{affine}")

    candidates = {"trilinear": upsample_trilinear(half), "volup": up}
    scores = {name: score(volume, original) for name, volume in candidates.items()}
    print(f"\nheld-out part, y >= {2 * volumes.HELD_OUT_FROM} of {original.shape[1]}:")
    print(f"{'':12}{'PSNR':>10}{'SSIM':>9}{'PSNR inside':>15}")
    for name, (psnr, ssim, inside) in scores.items():
        print(f"{name:12}{psnr:7.2f} dB{ssim:9.4f}{inside:12.2f} dB")

    figure = args.out / "superres.png"
    draw(figure, original, half, candidates, scores)
    print(f"\nvolume: {up_path}\nfigure: {figure}")

    psnr_gain = scores["volup"].psnr - scores["trilinear"].psnr
    ssim_gain = scores["volup"].ssim - scores["trilinear"].ssim
    # Asked this way round so that a NaN fails as well.
    if not (psnr_gain >= LEAST_PSNR_GAIN and ssim_gain >= LEAST_SSIM_GAIN):
        raise SystemExit(
            f"demo: FAILED, the decoder gains {psnr_gain:+.2f} dB and {ssim_gain:+.4f} SSIM over "
            f"trilinear, expected at least {LEAST_PSNR_GAIN:+.2f} dB and {LEAST_SSIM_GAIN:+.4f}"
        )


if __name__ == "__main__":
    main()
