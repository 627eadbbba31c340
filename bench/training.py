"""Times a forward and a backward pass beside PyTorch's, alternately in one process, on the CPU.

    python bench/training.py                        # the published blocks, batch 1
    python bench/training.py --shape kb2-61-block --rounds 15

Gradients are those of the input and of every parameter. `peak` is by how much the process grows at
most during one pass, inputs and parameters excluded, each in a process of its own.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import volup
from blocks import Block
from compare_torch import alternate, cpu_name
from volup import _native

HOW = ("volup", "save", "torch", "torch_last")
BLOCKS = [case["name"] for case in _native.published() if case["name"].endswith("-block")]


def passes(block: Block, how: str) -> Callable[[], object]:
    """A forward and a backward pass."""
    tensors = block.train()
    last = torch.channels_last_3d if how == "torch_last" else torch.contiguous_format
    input = block.input.detach().contiguous(memory_format=last).requires_grad_()
    tensors[0] = input
    shape = block.output_shape
    grad = torch.randn(shape, dtype=input.dtype).contiguous(memory_format=last)

    def forward() -> Tensor:
        if how.startswith("torch"):
            return block.run_torch(input)
        return block.run_volup(input, memory="save" if how == "save" else None)

    return lambda: torch.autograd.grad(forward(), tensors, grad)


def resident(field: str) -> float:
    """MiB of this process in memory: now (VmRSS) or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith(field))
    return int(kib) / 2**10


def peak(name: str, how: str) -> float:
    """MiB that a pass takes at most, in this process, which has run nothing else."""
    run = passes(Block(case_of(name), 1), how)
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def case_of(name: str) -> dict:
    return next(case for case in _native.published() if case["name"] == name)


def peak_elsewhere(name: str, how: str) -> float:
    command = [sys.executable, __file__, "--shape", name, "--peak", how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="*", choices=BLOCKS, default=BLOCKS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peak", choices=HOW, help="only print the peak of one shape")
    args = parser.parse_args()

    torch.manual_seed(0)
    if args.peak:
        print(peak(args.shape[0], args.peak))
        return
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, {torch.__version__=!s}")
    print("forward and backward, ms:", *(f"{how:>11}" for how in HOW), "    ratio   peak, MiB:")
    ratios = []
    for name in args.shape:
        block = Block(case_of(name), 1)
        ms = alternate({how: passes(block, how) for how in HOW}, args.rounds)
        ratios.append(ms["torch"] / ms["volup"])
        peaks = [peak_elsewhere(name, how) for how in HOW]
        times = " ".join(f"{ms[how]:11.1f}" for how in HOW)
        print(
            f"{name:25}{times}{ratios[-1]:10.2f}  ", *(f"{mib:7.0f}" for mib in peaks), flush=True
        )
    print(f"{'geometric mean':73}{statistics.geometric_mean(ratios):10.2f}")
    print(
        f"volup {volup.__version__}, engine {dict(_native.describe_cpu(torch.get_num_threads()))}"
    )


if __name__ == "__main__":
    main()
