"""Times a forward and a backward pass beside PyTorch's, alternately in one process.

    python bench/training.py                        # the published blocks, batch 1, on the CPU
    python bench/training.py --shape kb2-61-block --rounds 15
    python bench/training.py --device cuda --json out.json      # see training_cuda.py

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


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="*", choices=BLOCKS, default=BLOCKS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    cpu = parser.add_argument_group("on the CPU")
    cpu.add_argument("--rounds", type=int, default=9)
    cpu.add_argument("--peak", choices=HOW, help="only print the peak of one shape")
    cuda = parser.add_argument_group("on a GPU")
    names = ("ieee", "tf32", "bf16"), ("ncdhw", "ndhwc")
    for option, choices in zip(("--precisions", "--layouts"), names, strict=True):
        cuda.add_argument(option, nargs="+", choices=choices, default=choices)
    cuda.add_argument("--no-compile", dest="compile", action="store_false")
    cuda.add_argument(
        "--modes",
        nargs="+",
        choices=("compiled", "max_autotune"),
        default=("compiled", "max_autotune"),
        help="how PyTorch compiles; max_autotune takes longest to get ready",
    )
    cuda.add_argument("--seconds", type=float, default=0.3, help="to time each way for")
    cuda.add_argument(
        "--seconds-per-way", type=float, default=300.0, help="to search and to compile"
    )
    cuda.add_argument("--budget", type=float, default=3000.0, help="seconds for all rows")
    cuda.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.device == "cuda":
        import training_cuda

        return training_cuda.main([case_of(name) for name in args.shape], args)
    torch.manual_seed(0)
    if args.peak:
        print(peak(args.shape[0], args.peak))
        return 0
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
