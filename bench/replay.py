"""Runs plans on a GPU with kernels that were compiled since, checks them and times each launch.

    cargo run --release -p volup-cuda --example plans -- kb2-61 tf32,bf16 ncdhw 3 > plans.json
    make kernels
    python bench/replay.py plans.json crates/volup-kernels/cubins/sm_90 --steps

A change of a kernel is measured so without building volup anew: the plans, and what launches are
given, stay as they were. Results are compared with float64, those of the forward pass on the first
and the last sample. Times are medians; between runs the second-level cache is overwritten.
"""

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = {
    "ieee": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f64": torch.float64,
}
# Of ||got - exact|| / ||exact||.
LIMITS = {"ieee": 2e-6, "tf32": 2e-3, "bf16": 1e-2, "f16": 2e-3, "f64": 1e-12}
FORMATS = {"ncdhw": torch.contiguous_format, "ndhwc": torch.channels_last_3d}
NUMBERS = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
# Of cuFuncSetAttribute: the most dynamic shared memory, and how much of the cache is shared memory.
MOST_SHARED, CARVEOUT = 8, 9
PROGRAMMATIC_STREAM_SERIALIZATION = 6
ALIGNMENT = 256
# More than the second-level cache holds, and clocks in which a plan's launches are queued.
FLUSH_BYTES = 256 << 20
QUEUE_CLOCKS = 300_000


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a number."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


class Driver:
    """The CUDA driver with the cubins of some folders, of which the first that has one counts."""

    def __init__(self, folders: list[Path]) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.folders = folders
        self.kernels: dict[str, ctypes.c_void_p] = {}
        self.shared: dict[str, int] = {}

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: error {code}")

    def kernel(self, cubin: str, entry: str) -> ctypes.c_void_p:
        if cubin not in self.kernels:
            paths = [folder / f"{cubin}.cubin" for folder in self.folders]
            path = next((path for path in paths if path.exists()), None)
            if path is None:
                raise FileNotFoundError(f"{cubin}.cubin is in none of the folders")
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.call("cuModuleLoad", ctypes.byref(module), str(path).encode())
            self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
            self.kernels[cubin] = function
        return self.kernels[cubin]

    def launch(self, step: dict[str, Any], buffers: dict[str, int]) -> Callable[[], None]:
        """What does a step on the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if "clear" in step:
            at, words = step["clear"]
            address = ctypes.c_uint64(buffers["Workspace"] + at)
            zero, count = ctypes.c_uint(0), ctypes.c_size_t(words)
            return lambda: self.call("cuMemsetD32Async", address, zero, count, stream)
        function = self.kernel(step["cubin"], step["entry"])
        # What is allowed only grows: other launches of a plan may have more.
        allowed = self.shared[step["cubin"]] = max(
            self.shared.get(step["cubin"], 0), step["shared"]
        )
        for attribute, value in ((MOST_SHARED, allowed), (CARVEOUT, 100)):
            if allowed:
                self.call("cuFuncSetAttribute", function, attribute, value)
        values = [
            NUMBERS[kind](value)
            if kind in NUMBERS
            else ctypes.c_uint64(buffers[kind] + value if buffers.get(kind) else 0)
            for kind, value in step["arguments"]
        ]
        addresses = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values]
        arguments = (ctypes.c_void_p * len(values))(*addresses)
        early = Attribute(PROGRAMMATIC_STREAM_SERIALIZATION)
        early.value[0] = 1
        config = Config(
            (ctypes.c_uint * 3)(*step["grid"]),
            (ctypes.c_uint * 3)(step["threads"], 1, 1),
            step["shared"],
            stream,
            ctypes.pointer(early),
            int(step["overlap"]),
        )

        def launch(_alive: object = values) -> None:
            self.call("cuLaunchKernelEx", ctypes.byref(config), function, arguments, None)

        return launch


def activated(x: Tensor, activation: str | None) -> Tensor:
    """An activation, as plans print it."""
    if activation is None:
        return x
    name, _, argument = activation.rstrip(")").partition("(")
    if name == "leaky_relu":
        return functional.leaky_relu(x, float(argument))
    if name == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return getattr(torch if name in ("sigmoid", "tanh") else functional, name)(x)


def exact(plan: dict[str, Any], x: Tensor, of: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """In float64 the convolution's output, its activation, and the block's output."""
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    y = functional.conv_transpose3d(
        x,
        of["Weight"],
        of["Bias"] if plan["bias"] else None,
        **{name: plan[name] for name in names},
    )
    a = z = activated(y, plan["activation"])
    if plan["norm"]:
        groups, eps, affine = plan["norm"]
        scale = (of["NormWeight"], of["NormBias"]) if affine else (None, None)
        z = torch.group_norm(z, groups, *scale, eps)
    return y, a, activated(z, plan["post_activation"])


def median_us(runs: list[Callable[[], None]], rounds: int, junk: Tensor) -> list[float]:
    """Medians of the times that runs take one after the other, in microseconds."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        junk.zero_()
        torch.cuda._sleep(QUEUE_CLOCKS)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
        events[0].record()
        for run, event in zip(runs, events[1:], strict=True):
            run()
            event.record()
        torch.cuda.synchronize()
        for taken, start, end in zip(times, events, events[1:], strict=False):
            taken.append(1e3 * start.elapsed_time(end))
    return [statistics.median(taken) for taken in times]


def distance(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).nan_to_num(1).item()


def forward_error(plan: dict[str, Any], given: dict[str, Tensor], y: Tensor) -> float:
    of = {name: tensor.double() for name, tensor in given.items() if name != "Input"}
    error = 0.0
    for sample in {0, len(y) - 1}:
        one = slice(sample, sample + 1)
        x = given["Input"][one].double().contiguous()
        error = max(error, distance(y[one], exact(plan, x, of)[2]))
    return error


class Gradients:
    """What the passes of training read and write, and what they should."""

    def __init__(self, plan: dict[str, Any], given: dict[str, Tensor], format: Any) -> None:
        leaves = {name: t.double().contiguous().requires_grad_() for name, t in given.items()}
        y, a, z = exact(plan, leaves["Input"], leaves)
        y.retain_grad()
        dtype = given["Input"].dtype
        grad = torch.randn(z.shape, device="cuda").to(dtype, memory_format=format)
        z.backward(grad.double())
        self.expected = {"Output": z.detach()}
        if z is not y:
            self.expected["Convolution"] = y.detach()
        self.given = {"GradOutput": grad, "Convolution": y.detach().to(dtype, memory_format=format)}
        if plan["norm"]:
            groups, eps, _ = plan["norm"]
            rows = a.detach().view(len(a), groups, -1)
            rstd = (rows.var(2, correction=0) + eps).rsqrt()
            self.expected |= {"Mean": rows.mean(2), "Rstd": rstd}
        accumulator = torch.promote_types(dtype, torch.float32)
        for name in ("Mean", "Rstd"):
            if name in self.expected:
                self.given[name] = self.expected[name].to(accumulator)
        task = plan["task"].partition("(")[0]
        if task == "Recompute":
            self.given = {"GradOutput": grad}
        if task in ("Backward", "Recompute"):
            self.expected = {f"Grad{k}": t.grad for k, t in leaves.items() if t.grad is not None}
        else:
            self.given = {}
        self.got = {
            name: torch.full_like(
                tensor,
                torch.nan,
                dtype=accumulator if name in ("Mean", "Rstd") else dtype,
                memory_format=format if tensor.dim() == 5 and name != "GradWeight" else None,
            )
            for name, tensor in self.expected.items()
        }

    def error(self) -> float:
        worst = {k: distance(self.got[k], expected) for k, expected in self.expected.items()}
        print("  ", " ".join(f"{name} {error:.1e}" for name, error in worst.items()))
        return max(worst.values())


def replay(plan: dict[str, Any], driver: Driver, args: argparse.Namespace, junk: Tensor) -> bool:
    """Prints a line on a plan; whether its result is right."""
    precision, dtype = plan["precision"], DTYPES[plan["precision"]]
    # Of the input, and of the output.
    format, output_format = (FORMATS[name] for name in (2 * plan["layout"].split(">"))[:2])
    random = torch.Generator("cuda").manual_seed(1)
    fresh = {"device": "cuda", "generator": random}
    channels = plan["output"][1]
    shapes = {"Input": plan["input"], "Weight": plan["weight"]}
    if plan["bias"]:
        shapes["Bias"] = [channels]
    if plan["norm"] and plan["norm"][2]:
        shapes |= {"NormWeight": [channels], "NormBias": [channels]}
    given = {name: torch.randn(shape, **fresh).to(dtype) for name, shape in shapes.items()}
    given["Input"] = given["Input"].to(memory_format=format)
    # What no launch writes shows.
    y = torch.full(plan["output"], torch.nan, device="cuda", dtype=dtype)
    y = y.to(memory_format=output_format)
    tensors = given | {"Output": y}
    gradients = None
    if plan["task"] != "Forward":
        gradients = Gradients(plan, given, format)
        tensors = given | gradients.given | gradients.got
    workspace = torch.full((plan["workspace"] + ALIGNMENT,), 0x7F, device="cuda", dtype=torch.uint8)
    buffers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    buffers["Workspace"] = -(-workspace.data_ptr() // ALIGNMENT) * ALIGNMENT

    launches = [driver.launch(step, buffers) for step in plan["steps"]]

    def run() -> None:
        for launch in launches:
            launch()

    run()
    torch.cuda.synchronize()
    error = gradients.error() if gradients else forward_error(plan, given, y)
    right = error <= LIMITS[precision]
    others = 0
    if args.repeat:
        written = list(gradients.got.values()) if gradients else [y]
        first = [tensor.clone() for tensor in written]
        for _ in range(args.repeat):
            run()
            others += not all(map(torch.equal, written, first))
        right = right and not others
    line = f"{plan['shape']:22} {plan['layout']:6}{precision:5} error {error:.1e}"
    line += f" {others} of {args.repeat} differ" if others else ""
    line += "" if right else " WRONG"
    if args.rounds:
        line += f" {median_us([run], args.rounds, junk)[0]:9.1f} us"
        line += f" (expected {1e3 * plan['expected_ms']:.0f})"
    if args.steps:
        names = [step.get("entry", "clear").removesuffix("_entry") for step in plan["steps"]]
        times = median_us(launches, max(args.rounds, 1), junk)
        line += "".join(f" | {name} {time:.1f}" for name, time in zip(names, times, strict=True))
    print(f"{line} | {plan['plan']}", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plans", type=Path, help="what the example `plans` printed")
    parser.add_argument("folders", type=Path, nargs="+", help="of cubins")
    parser.add_argument("--rounds", type=int, default=15, help="0: no times")
    parser.add_argument("--repeat", type=int, default=0, help="runs to compare with the first one")
    parser.add_argument(
        "--steps", action="store_true", help="also each launch, with what an event costs"
    )
    args = parser.parse_args()
    driver = Driver(args.folders)
    junk = torch.empty(FLUSH_BYTES, device="cuda", dtype=torch.uint8)
    wrong = 0
    for plan in json.loads(args.plans.read_text()):
        wrong += not replay(plan, driver, args, junk)
    if wrong:
        print(f"error: {wrong} results are wrong", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
