"""Convolutions of random sizes, for finding where a plan is badly chosen."""

import math
import random
from typing import Any

# Elements of an output, and multiply-adds, at most: 1 GB of float32, a few milliseconds of tf32.
MOST_ELEMENTS = 250_000_000
MOST_WORK = 400e9
LEAST_ELEMENTS = 200_000


def random_cases(count: int, seed: int) -> list[dict[str, Any]]:
    """Cases as `volup._native` describes them, common ones and strange ones."""
    draw = random.Random(seed)
    cases: list[dict[str, Any]] = []
    while len(cases) < count:
        case = _draw(draw)
        if case is not None:
            cases.append(case)
    return cases


def _draw(draw: random.Random) -> dict[str, Any] | None:
    groups = draw.choice((1, 1, 1, 1, 2, 4))
    channels = [
        groups * draw.choice((1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)) for _ in "io"
    ]
    alike = draw.random() < 0.7
    kernel = _three(draw, (1, 2, 3, 3, 4, 5), alike)
    stride = _three(draw, (1, 1, 2, 2, 2, 3), alike)
    dilation = _three(draw, (1, 1, 1, 1, 1, 2), alike)
    padding = [draw.randrange(d * (k - 1) // 2 + 1) for k, d in zip(kernel, dilation, strict=True)]
    output_padding = [draw.randrange(s) if draw.random() < 0.5 else 0 for s in stride]
    size = math.exp(draw.uniform(math.log(6), math.log(96)))
    input = [max(2, round(size * draw.uniform(0.5, 1.5))) for _ in "dhw"]
    axes = zip(input, kernel, stride, padding, output_padding, dilation, strict=True)
    output = [(i - 1) * s - 2 * p + d * (k - 1) + op + 1 for i, k, s, p, op, d in axes]
    if min(output) < 1:
        return None
    batch = draw.choice((1, 2, 4, 8, 16))
    elements = batch * channels[1] * math.prod(output)
    work = batch * math.prod(input) * channels[0] * channels[1] // groups * math.prod(kernel)
    if not LEAST_ELEMENTS <= elements <= MOST_ELEMENTS or work > MOST_WORK:
        return None

    def text(sizes: list[int]) -> str:
        return "x".join(map(str, sizes))

    name = f"n{batch} {text(input)} {channels[0]}>{channels[1]} k{text(kernel)} s{text(stride)}"
    name += f" p{text(padding)} op{text(output_padding)} d{text(dilation)} g{groups}"
    block = {
        "in_channels": channels[0],
        "out_channels": channels[1],
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "output_padding": output_padding,
        "dilation": dilation,
        "groups": groups,
        "bias": draw.random() < 0.5,
        **dict.fromkeys(("activation", "post_activation", "norm_groups")),
        "eps": 1e-5,
    }
    return {"name": name, "block": block, "batch": batch, "input": input}


def _three(draw: random.Random, values: tuple[int, ...], alike: bool) -> list[int]:
    return [draw.choice(values)] * 3 if alike else [draw.choice(values) for _ in "dhw"]
