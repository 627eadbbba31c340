"""Microseconds that a call costs the host, where the GPU has next to nothing to do."""

import time
from functools import partial

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

    def block() -> torch.Tensor:
        return volup.conv_transpose3d_block(
            x, w, b, 2, activation="relu", norm_groups=4, norm_weight=b, norm_bias=b
        )

    layer = volup.nn.ConvTranspose3d(8, 8, 2, 2, device="cuda")
    layers = volup.nn.ConvTranspose3dBlock(8, 8, 2, 2, norm_groups=4, device="cuda")
    calls = {
        "volup.conv_transpose3d": lambda: volup.conv_transpose3d(x, w, b, 2),
        "torch conv_transpose3d": lambda: F.conv_transpose3d(x, w, b, 2),
        "volup.conv_transpose3d_block": block,
        "torch conv, relu, group_norm": lambda: F.group_norm(
            F.relu(F.conv_transpose3d(x, w, b, 2)), 4, b, b
        ),
        "volup.nn.ConvTranspose3d": lambda: layer(x),
        "volup.nn.ConvTranspose3dBlock": lambda: layers(x),
    }
    leaves = {
        "volup.nn.ConvTranspose3d": (x, *layer.parameters()),
        "volup.nn.ConvTranspose3dBlock": (x, *layers.parameters()),
    }
    with torch.inference_mode():
        for name, call in calls.items():
            print(f"{name:30} {microseconds(call):7.2f} us a call")
    for tensor in (x, w, b):
        tensor.requires_grad_()
    for name, call in calls.items():
        output = call()
        grad = torch.randn_like(output)
        print(f"{name:30} {microseconds(call):7.2f} us a call that records")
        inputs = leaves.get(name, (x, w, b))
        backward = partial(torch.autograd.grad, output, inputs, grad, retain_graph=True)
        print(f"{'':30} {microseconds(backward):7.2f} us its gradients")


if __name__ == "__main__":
    main()
