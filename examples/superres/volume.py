"""Volumes of the example: reading, writing, halving, and where the held-out part begins.

Arrays are [D, H, W] = [z, y, x], x fastest in memory, as `volup` and SimpleITK lay them out.
NIfTI stores the same bytes but nibabel shows them as [x, y, z], hence the transposes here.
"""

from pathlib import Path

import numpy as np

# The template is left-right symmetric, so a split along x would test on a mirror image of what was
# trained on. The split runs along y (posterior to anterior), in voxels of the half volume. The gap
# between the parts is wider than the decoder's convolutions reach (4 half voxels), so none of them
# computes a held-out voxel from one that was trained on.
TRAIN_UNTIL = 72
HELD_OUT_FROM = 78


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The volume as float32 [z, y, x], and its affine from [x, y, z] voxels to millimetres."""
    if Path(path).suffix == ".npy":
        return np.load(path).astype(np.float32), np.eye(4)
    import nibabel  # here, so that training from an .npy file needs no NIfTI reader

    image = nibabel.load(path)
    return np.ascontiguousarray(image.get_fdata(dtype=np.float32).T), image.affine


def write(path: Path, volume: np.ndarray, affine: np.ndarray) -> None:
    """Writes a [z, y, x] volume as float32 NIfTI."""
    import nibabel

    image = nibabel.Nifti1Image(volume.T.astype(np.float32), affine)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, path)


def crop_to_even(volume: np.ndarray) -> np.ndarray:
    """Drops the last plane of every axis of odd length."""
    return volume[tuple(slice(0, size // 2 * 2) for size in volume.shape)]


def halve(volume: np.ndarray) -> np.ndarray:
    """The mean of every 2x2x2 cube of voxels; all three sizes must be even."""
    d, h, w = (size // 2 for size in volume.shape)
    return volume.reshape(d, 2, h, 2, w, 2).mean(axis=(1, 3, 5), dtype=np.float32)


def halve_affine(affine: np.ndarray) -> np.ndarray:
    """The affine of the halved volume: voxels twice as wide, and the first one's centre lies where
    the first eight original voxels meet, half an original voxel further along each axis."""
    step = np.diag([2.0, 2.0, 2.0, 1.0])
    step[:3, 3] = 0.5
    return affine @ step
