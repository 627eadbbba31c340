"""Time and memory of calls, on a GPU and, to try the benchmark without one, on the CPU."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Compute = Callable[[Tensor], Tensor]

# What a call takes the host to launch, at least and at most: the GPU is kept busy for as long
# before a sample starts, and for half as long again.
LAUNCH_MS = (0.1, 4.0)
MARGIN = 1.5
# So often a sample is taken anew where the host was slower: the GPU may have waited for it.
MOST_TRIES = 5
# A sample of short calls spans this.
SAMPLE_MS = 0.5
MOST_CALLS = 20
MOST_COPIES = 32


class Rotation:
    """Calls a function on one copy of its input after another, and keeps as many outputs.

    Where input and output would stay in the cache from call to call, more copies push them out, as
    the rest of a model would.
    """

    def __init__(self, compute: Compute, inputs: Sequence[Tensor]) -> None:
        self.compute = compute
        self.inputs = inputs
        self.outputs: list[Tensor | None] = [None] * len(inputs)
        self.turn = 0
        self.launch_ms = LAUNCH_MS[1]

    def __call__(self) -> None:
        at = self.turn % len(self.inputs)
        self.turn += 1
        self.outputs[at] = None  # So that its memory is taken again.
        self.outputs[at] = self.compute(self.inputs[at])

    def release(self) -> None:
        self.outputs = [None] * len(self.inputs)


class CudaClock:
    """Events around calls that were queued while the GPU was busy: its own time, without gaps."""

    device = "cuda"

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(0)
        self.cache_bytes = int(properties.L2_cache_size)
        cycles = 1 << 22
        self.cycles_per_ms = cycles / self._time(lambda: torch.cuda._sleep(cycles))[0]

    def _time(self, run: Callable[[], None], calls: int = 1) -> tuple[float, float]:
        """Milliseconds of a call on the GPU, and until the host had launched it."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before = time.perf_counter()
        start.record()
        for _ in range(calls):
            run()
        end.record()
        launched = time.perf_counter() - before
        end.synchronize()
        return float(start.elapsed_time(end)) / calls, 1e3 * launched / calls

    def sample(self, run: Rotation, estimate_ms: float) -> float:
        """Milliseconds of a call."""
        calls = calls_in_sample(estimate_ms)
        for _ in range(MOST_TRIES):
            busy_ms = MARGIN * run.launch_ms
            torch.cuda._sleep(int(self.cycles_per_ms * busy_ms * calls))
            ms, launch_ms = self._time(run, calls)
            run.launch_ms = min(max(launch_ms, LAUNCH_MS[0]), LAUNCH_MS[1])
            run.release()
            if launch_ms <= busy_ms:
                break
        return ms

    def extra_bytes(self, compute: Compute, input: Tensor) -> int:
        """What a call takes from PyTorch's allocator at its peak, beside its output."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = compute(input)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - output.untyped_storage().nbytes()

    def free(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class CpuClock:
    """The host's clock."""

    device = "cpu"
    cache_bytes = 0

    def sample(self, run: Rotation, estimate_ms: float) -> float:
        """Milliseconds of a call."""
        calls = calls_in_sample(estimate_ms)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        ms = 1e3 * (time.perf_counter() - start) / calls
        run.release()
        return ms

    def extra_bytes(self, compute: Compute, input: Tensor) -> int:
        """Not known."""
        return 0

    def free(self) -> None:
        pass


Clock = CudaClock | CpuClock


def calls_in_sample(estimate_ms: float) -> int:
    return max(1, min(MOST_CALLS, round(SAMPLE_MS / max(estimate_ms, 1e-6))))


def copies_to_defeat(cache_bytes: int, bytes_of_call: int) -> int:
    """How many inputs to rotate over, so that a call finds neither input nor output cached."""
    if bytes_of_call > cache_bytes:
        return 1
    return min(MOST_COPIES, -(-2 * cache_bytes // bytes_of_call))
