"""Microseconds that a call costs the host, where the GPU has next to nothing to do."""

import time

import torch
import torch.nn.functional as F

import volup

CALLS = 10_000


def microseconds(call) -> float:
    for _ in range(100):
        call()
    torch.cuda.synchronize()
    # In portions, so that the queue of launches never fills up and makes the host wait.
    portion, seconds = 100, 0.0
    for _ in range(CALLS // portion):
        start = time.perf_counter()
        for _ in range(portion):
            call()
        seconds += time.perf_counter() - start
        torch.cuda.synchronize()
    return seconds / CALLS * 1e6


def main() -> None:
    x = torch.randn(1, 8, 4, 4, 4, device="cuda")
    w = torch.randn(8, 8, 2, 2, 2, device="cuda")
    b = torch.randn(8, device="cuda")

    def block() -> None:
        volup.conv_transpose3d_block(
            x, w, b, 2, activation="relu", norm_groups=4, norm_weight=b, norm_bias=b
        )

    calls = {
        "volup.conv_transpose3d": lambda: volup.conv_transpose3d(x, w, b, 2),
        "torch conv_transpose3d": lambda: F.conv_transpose3d(x, w, b, 2),
        "volup.conv_transpose3d_block": block,
        "torch conv, relu, group_norm": lambda: F.group_norm(
            F.relu(F.conv_transpose3d(x, w, b, 2)), 4, b, b
        ),
    }
    with torch.inference_mode():
        for name, call in calls.items():
            print(f"{name:30} {microseconds(call):7.2f} us a call")


if __name__ == "__main__":
    main()
