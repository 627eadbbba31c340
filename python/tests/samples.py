"""The tensors of most tests, and the usual comparison."""

import torch
import torch.nn.functional as F
from torch import Tensor


def example() -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight and a bias that fit together."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 3, 4, 5), (4, 6, 3, 3, 3), (6,))
    input, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return input, weight, bias


X, W, B = example()


def close(got: Tensor, theirs: Tensor) -> None:
    """Equal but for the order of sums, and in the same strides."""
    torch.testing.assert_close(got, theirs, rtol=1e-4, atol=1e-4, check_stride=True)


def close_to_rounded(got: Tensor, to: torch.dtype, *operands: Tensor) -> None:
    """What the definition makes of operands rounded to a narrow type.

    PyTorch's own sums are of that type on a CPU that lacks instructions for it.
    """
    exact = F.conv_transpose3d(*(operand.to(to).double() for operand in operands))
    torch.testing.assert_close(got, exact.to(to), rtol=1e-2, atol=1e-2)
