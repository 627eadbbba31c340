"""Tests and times volup on a GPU machine that has PyTorch and nothing else.

    make gpu-bundle                          # where the repository is
    python3 .gpu-bundle/gpu.py               # where the GPU is
    python3 .gpu-bundle/gpu.py --only bench --shapes kb2-61 kb1-73 --precisions tf32 --out results

Stages: `conformance` runs the CUDA engine's Rust tests, `tests` the Python tests of the forward
pass and the KernelBench solutions, `gradients` the Python tests of training, `stress` thousands of
plans on several streams and, where there are two GPUs, tests of both, `sanitizer`
compute-sanitizer over small cases, `bench` the comparison with cuDNN. `training` times forward and
backward passes, and runs only if it is asked for, as PyTorch compiles its side for minutes:
`--only training --seconds 3000`.

A stage that fails does not keep the next from running; the exit code says whether any did. The
output folder gets a log of each stage, and the end of what failed is printed.
"""

import argparse
import itertools
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BUNDLE = Path(__file__).resolve().parent

# Small cases of every kind: dense, strided, one tap a phase, groups, empty phases, few channels,
# channels-last, blocks.
SANITIZED = (
    "k3",
    "k3-s2-vectors",
    "last-s2",
    "last-vectors",
    "few-tiles",
    "last-few-tiles",
    "pointwise",
    "relu-empty-phases",
    "s-d-mixed",
    "kb1-72-small",
    "kb1-73-small",
    "kb1-77-small",
    "kb2-60-block-small",
    "kb2-61-block-small",
    "nnunet-320-256-8-small",
    "nnunet-64-32-64-block-small",
    "last-block",
    "last-k-s",
    "last-k-s-many",
)
# Of these, those with a normalization.
NORMALIZED = tuple(name for name in SANITIZED if "block" in name)
# And those that `interleave` stores by the copy engine.
VECTORS = ("last-k-s",)
# What a checked call computes in: a precision for float32, or a type.
SANITIZED_PRECISIONS = (
    ("--precision", "ieee", "--dtype", "f32", "--dtype", "bf16"),
    ("--precision", "tf32", "--dtype", "f32"),
)
# Each computes what it can of these cases; the plan would choose one of them.
FAMILIES = (
    "direct",
    "linear_gemm",
    "interleave",
    "halo_gemm",
    "gather_gemm",
    "box_gemm",
    "shuffle_gemm",
    "shuffle_ring",
    "pointwise",
)
# These have more to do in the passes of training.
OF_TRAINING = ("shuffle_wgmma", "implicit_gemm")
# Kernels of gradients that the plan seldom takes for small cases, with a family that leaves them
# to be chosen.
KERNELS = {
    "plane_gradient": "implicit_gemm",
    "shuffle_gradient": "shuffle_gemm",
    "weight_gradient": "halo_gemm",
    "weight_gradient_lines": "halo_gemm",
    "weight_gradient_narrow": "halo_gemm",
    "half_input": "halo_gemm",
    "channel_largest": "halo_gemm",
}
# In tf32 families that the plan takes with operands of one fp16 where there is more to do.
SCALED = {f"{family} scaled": family for family in ("halo_gemm", "gather_gemm")}
# A kernel that the plan seldom takes for small cases.
SWEEPS = ("--kernel", "halo_sweep", "--algorithm", "halo_gemm")
# How each is asked for; and gradients by the plan's choice.
CHECKED = {
    "gradients": ("--gradients",),
    **{name: ("--algorithm", name) for name in FAMILIES},
    **{name: ("--gradients", "--algorithm", name) for name in OF_TRAINING},
    **{
        name: ("--gradients", "--kernel", name, "--algorithm", family)
        for name, family in KERNELS.items()
    },
    **{name: ("--kernel", "half_scale", "--algorithm", family) for name, family in SCALED.items()},
    "halo_sweep": SWEEPS,
}
# Kernels that only blocks of some sizes take: precision, type, family and name, and blocks. Sweeps
# that take a norm's statistics, and norms beside products, by what stands in for these.
COUNTED = (
    "n 2, 2x13x15, 2>36, k 3, p 1, bias, relu, gn 9",
    "n 1, 2x14x14, 8>8, k 3, leaky_relu(0.1), gn 2, silu",
)
BEHIND = (
    "n 4, 4x4x4, 64>32, k 3, bias, relu, gn 8, leaky_relu(0.1)",
    "n 2, 16x16x16, 64>256, k 1, relu, gn 1",
)
OF_BLOCKS = (
    ("ieee", "f32", "halo_gemm", "halo_sweep_2x32x3x1x1x3x1", COUNTED),
    ("ieee", "bf16", "halo_gemm", "halo_sweep_bf16_0x32x3x1x1x3x1", COUNTED),
    ("tf32", "f32", "halo_gemm", "halo_sweep_5x32x3x1x1x3x1", COUNTED),
    ("ieee", "f32", "gather_gemm", "direct_norm", BEHIND),
    ("ieee", "bf16", "gather_gemm", "direct_norm", BEHIND),
    ("tf32", "f32", "gather_gemm", "direct_norm", BEHIND),
    ("ieee", "f32", "halo_gemm", "direct_norm", BEHIND),
)
TOOLS = ("memcheck", "racecheck", "initcheck")
SANITIZER_ERROR = 86
# Lines of a failed command that are shown.
TAIL = 25
# Commands that a stage's last line tells of one by one.
MOST_DETAILS = 3
# The most seconds a stage may take, so that one that hangs leaves time for the others.
MOST_SECONDS = {
    "conformance": 240.0,
    "tests": 150.0,
    "gradients": 200.0,
    "stress": 300.0,
    "sanitizer": 420.0,
    "bench": 480.0,
    "training": 3600.0,
}
# The Rust tests of the stage of that name.
STRESS = "stress"
# Run if it is named.
ASKED_FOR = ("training",)


@dataclass
class Stage:
    """Runs commands one after another within a time, and remembers how they went."""

    name: str
    out: Path
    environment: dict[str, str]
    deadline: float
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    output: str = ""
    skipped: bool = False

    def skip(self, why: str) -> None:
        self.skipped = True
        self.notes.append(why)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def details(self) -> str:
        """A line on what failed, or on what went well if that is short."""
        some = self.failures[:MOST_DETAILS]
        if len(self.failures) > len(some):
            some.append(f"{len(self.failures) - len(some)} more failed")
        if len(self.notes) > MOST_DETAILS:
            return "; ".join([*some, f"{len(self.notes)} ok"])
        return "; ".join([*some, *self.notes])

    def run(
        self,
        label: str,
        command: Sequence[str | Path],
        summary: Callable[[str], str],
        echo: bool = False,
    ) -> int:
        """The command's exit code; -1 if it could not start or took too long."""
        if self.left() < 1:
            self.failures.append(f"{label}: no time left")
            return -1
        code, start = -1, time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as file:
            try:
                process = subprocess.Popen(
                    command,
                    cwd=BUNDLE,
                    env=self.environment,
                    stdout=None if echo else file,
                    stderr=None if echo else file,
                    start_new_session=True,
                )
                try:
                    code = process.wait(timeout=self.left())
                    reason = f"exit code {code}"
                except subprocess.TimeoutExpired:
                    # And whatever it has started.
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    reason = "took too long"
            except OSError as error:
                reason = str(error)
            file.seek(0)
            text = self.output = file.read()
        if not echo:
            with (self.out / f"{self.name}.log").open("a") as log:
                log.write(f"--- {label}: {' '.join(map(str, command))}\n{text}\n")
        found = summary(text)
        if code == 0:
            self.notes.append(f"{label}: {found}" if found else label)
        else:
            self.failures.append(f"{label}: {reason}" + (f", {found}" if found else ""))
            print("\n".join(f"  | {line}" for line in text.splitlines()[-TAIL:]), flush=True)
        seconds = time.monotonic() - start
        print(f"{self.name} {label}: {reason}, {seconds:.0f} s. {found}", flush=True)
        return code


def last_match(pattern: str) -> Callable[[str], str]:
    """What the pattern finds last in a command's output."""

    def summary(text: str) -> str:
        found = re.findall(pattern, text, re.MULTILINE)
        return found[-1] if found else ""

    return summary


def conformance(stage: Stage, _args: argparse.Namespace) -> None:
    binaries = sorted(path for path in (BUNDLE / "tests").iterdir() if path.name != STRESS)
    if not binaries:
        stage.failures.append("the bundle holds no tests")
    for binary in binaries:
        stage.run(binary.name, [binary], last_match(r"^test result: (.*)$"))


def tests(stage: Stage, _args: argparse.Namespace) -> None:
    pytest(stage, "test_cuda")
    pytest(stage, "test_frozen")
    script = "examples/kernelbench/check.py"
    command = [sys.executable, script, "--device", "cuda"]
    stage.run("kernelbench", command, lambda text: f"{text.count('ok  ')} ok")


def gradients(stage: Stage, _args: argparse.Namespace) -> None:
    pytest(stage, "test_cuda_training")
    pytest(stage, "test_superres")


def stress(stage: Stage, _args: argparse.Namespace) -> None:
    # What they print says how much was done, or why it was not.
    found = last_match(r"^test result: (.*)$")
    said = re.compile(r"\b(?:stress|devices|skipped): .*$", re.MULTILINE)
    command = [BUNDLE / "tests" / STRESS, "--nocapture", "--test-threads=1"]
    stage.run(STRESS, command, lambda text: "; ".join([found(text), *said.findall(text)]))
    pytest(stage, "test_cuda_devices")


def pytest(stage: Stage, name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command.append(f"python/tests/{name}.py")
    stage.run("python", command, last_match(r"^.*\bin [\d.]+s.*$"))


def sanitizer(stage: Stage, _args: argparse.Namespace) -> None:
    program = find_sanitizer()
    if program is None:
        stage.skip("compute-sanitizer is not there")
        return
    volup = str(BUNDLE / "bin" / "volup")
    for tool, (label, options) in checks():
        command = [program, "--tool", tool, "--error-exitcode", str(SANITIZER_ERROR)]
        command += [volup, "check", "--device", "cuda", *options]
        errors = last_match(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*|.*Device not supported.*)$")
        if stage.run(f"{tool} {label}", command, errors) == 0:
            continue
        # Some virtual machines do not let debugging tools near the GPU.
        if "Device not supported" in stage.output:
            stage.failures.clear()
            stage.skip("compute-sanitizer does not support this machine")
            return


def checks() -> Iterator[tuple[str, tuple[str, list[str]]]]:
    """What the sanitizer runs: its tool, and a name and the options of a check."""
    for tool in TOOLS:
        for name, options in itertools.product(CHECKED, SANITIZED_PRECISIONS):
            cases = [part for case in sanitized(tool, name) for part in ("--case", case)]
            if cases and (name not in SCALED or "tf32" in options):
                yield tool, (f"{name} {options[1]}", [*CHECKED[name], *options, *cases])
        for precision, dtype, family, kernel, specs in OF_BLOCKS:
            options = ["--precision", precision, "--dtype", dtype, "--algorithm", family]
            options += ["--kernel", kernel, *(part for spec in specs for part in ("--spec", spec))]
            yield tool, (f"{family} {kernel} {precision} {dtype}", options)


def sanitized(tool: str, name: str) -> tuple[str, ...]:
    """The cases of a run.

    initcheck does not see what the GPU's copy engine stores. `interleave` stores by it where sizes
    are whole vectors, `implicit_gemm` by it what is whole vectors of any size; a normalization or a
    copy to the host would count as reading uninitialized memory.
    """
    if (tool, name) == ("initcheck", "implicit_gemm"):
        return ()
    if (tool, name) == ("initcheck", "interleave"):
        return tuple(case for case in SANITIZED if case not in NORMALIZED + VECTORS)
    return SANITIZED


def find_sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    candidates = Path("/usr/local").glob("cuda*/bin/compute-sanitizer")
    return found or next((str(path) for path in sorted(candidates, reverse=True)), None)


def bench(stage: Stage, args: argparse.Namespace) -> None:
    options = shared(stage, args, shapes="--shapes")
    command = [sys.executable, "bench/compare_cudnn.py", *options]
    if args.compile:
        command.append("--compile")
    stage.run("cudnn", command, lambda _text: "", echo=True)


def training(stage: Stage, args: argparse.Namespace) -> None:
    options = shared(stage, args, shapes="--shape")
    command = [sys.executable, "bench/training.py", "--device", "cuda", *options]
    if args.no_compile:
        command.append("--no-compile")
    if args.modes:
        command += ["--modes", *args.modes]
    stage.run("pytorch", command, lambda _text: "", echo=True)


def shared(stage: Stage, args: argparse.Namespace, shapes: str) -> list[str]:
    """The options that benchmarks share."""
    options = ["--json", str(stage.out / f"{stage.name}.json")]
    # Half a minute for the shape that is being timed when the time is over.
    options += ["--budget", f"{max(stage.left() - 30, 1):.0f}"]
    options += ["--seconds", str(args.seconds_per_row)]
    for option, values in (
        (shapes, args.shapes),
        ("--precisions", args.precisions),
        ("--layouts", args.layouts),
    ):
        if values:
            options += [option, *values]
    return options


STAGES: dict[str, Callable[[Stage, argparse.Namespace], None]] = {
    "conformance": conformance,
    "tests": tests,
    "gradients": gradients,
    "stress": stress,
    "sanitizer": sanitizer,
    "bench": bench,
    "training": training,
}


def unpack() -> None:
    """Puts the bundle's executables beside what they are packed in."""
    for packed in BUNDLE.glob("*/*.xz"):
        target = packed.with_suffix("")
        target.write_bytes(lzma.decompress(packed.read_bytes()))
        target.chmod(0o755)
        packed.unlink()


def install(folder: Path) -> dict[str, str]:
    """Puts the bundle's wheels into a folder; the environment in which Python finds them."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    options = ["--no-compile", "--no-cache-dir", "--disable-pip-version-check", "--target"]
    wheels = sorted(str(path) for path in (BUNDLE / "wheels").glob("*.whl"))
    subprocess.run([*pip, *options, str(folder), *wheels], check=True)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "VOLUP_REQUIRE_GPU": "1",
        "VOLUP_CLI": str(BUNDLE / "bin" / "volup"),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        type=stages,
        default=[name for name in STAGES if name not in ASKED_FOR],
        metavar="STAGE,...",
        help=f"some of {','.join(STAGES)}",
    )
    parser.add_argument("--seconds", type=float, default=570.0, help="for all stages together")
    parser.add_argument(
        "--out", type=Path, default=BUNDLE / "out", help="folder of logs, bench.json, training.json"
    )
    timed = parser.add_argument_group("bench and training")
    timed.add_argument("--shapes", nargs="+", metavar="NAME")
    timed.add_argument("--precisions", nargs="+", choices=("ieee", "tf32", "bf16"))
    timed.add_argument("--layouts", nargs="+", choices=("ncdhw", "ndhwc"))
    timed.add_argument("--seconds-per-row", type=float, default=0.3)
    timed.add_argument(
        "--compile", action="store_true", help="torch.compile bench's blocks as well"
    )
    timed.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out of training"
    )
    timed.add_argument(
        "--modes", nargs="+", choices=("compiled", "max_autotune"), help="how training compiles"
    )
    return parser.parse_args()


def stages(text: str) -> list[str]:
    names = text.split(",")
    unknown = set(names) - set(STAGES)
    if unknown:
        raise argparse.ArgumentTypeError(f"no such stage: {', '.join(sorted(unknown))}")
    return [name for name in STAGES if name in names]


def main() -> int:
    args = arguments()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    for log in args.out.glob("*.log"):
        log.unlink()
    end = time.monotonic() + args.seconds
    table = []
    failed = False
    unpack()
    with tempfile.TemporaryDirectory() as folder:
        environment = install(Path(folder))
        for name in args.only:
            start = time.monotonic()
            deadline = min(end, start + MOST_SECONDS[name])
            stage = Stage(name, args.out, environment, deadline)
            print(f"--- {name}", flush=True)
            STAGES[name](stage, args)
            failed |= bool(stage.failures)
            verdict = "FAIL" if stage.failures else "skip" if stage.skipped else "ok"
            seconds = time.monotonic() - start
            table.append(f"{name:12}{verdict:5}{seconds:6.0f} s  {stage.details()}")
    print(f"--- commit {(BUNDLE / 'commit').read_text().strip()}")
    print("\n".join(table))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
