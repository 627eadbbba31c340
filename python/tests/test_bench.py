"""What the GPU benchmark computes without a GPU: peers, floors, errors, its JSON."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from volup import _native

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import compare_cudnn
import training
import training_cuda
from blocks import Block
from clocks import CpuClock, calls_in_sample, copies_to_defeat
from peers import peers
from random_shapes import MOST_ELEMENTS, random_cases

TABLE = {
    case["name"]: case
    for case in _native.cases()
    if case["batch"]
    and case["block"]["activation"] in (None, "relu", "silu", "hardswish")
    # Published shapes have no other.
    and case["block"]["post_activation"] in (None, "hardswish")
    and (case["block"]["norm_groups"] is None or case["block"]["affine"])
}
SMALL = ["kb1-58-small", "kb1-72-small", "kb2-60-block-small", "nnunet-64-32-64-block-small"]


@pytest.fixture(autouse=True)
def flags_may_change() -> Iterator[None]:
    """PyTorch's own test tools, which another test imports, freeze its flags for good."""
    with torch.backends.__allow_nonbracketed_mutation():
        yield


def test_random_shapes_are_valid_and_the_same_again() -> None:
    cases = random_cases(50, 3)
    assert cases == random_cases(50, 3) != random_cases(50, 4)
    for case in cases:
        with torch.device("meta"):
            block = Block(case, device="meta")
            assert list(block.run_torch(block.input).shape) == block.output_shape
        assert math.prod(block.output_shape) <= MOST_ELEMENTS


@pytest.mark.parametrize("name", TABLE)
def test_peers_compute_the_same(name: str) -> None:
    block = Block(TABLE[name], dtype=torch.float64)
    expected = block.run_torch(block.input)
    assert list(expected.shape) == block.output_shape
    torch.testing.assert_close(block.run_volup(block.input), expected)
    for peer in peers(block):
        torch.testing.assert_close(peer.compute(block.input), expected)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_every_kind_of_peer_competes() -> None:
    def names(case: str) -> set[str]:
        return {peer.name for peer in peers(Block(TABLE[case]))}

    own = {"conv_transpose3d ncdhw", "conv_transpose3d ndhwc"}
    assert names("s2-p1") == own
    assert names("k3") == own | {"conv3d ncdhw", "conv3d ndhwc"}
    assert names("k-s") == own | {"matmul ncdhw", "matmul ndhwc"}


@pytest.mark.parametrize("name", TABLE)
def test_flops_are_those_of_a_convolution_of_ones(name: str) -> None:
    block = Block(TABLE[name])
    ones = torch.nn.functional.conv_transpose3d(
        torch.ones_like(block.input), torch.ones_like(block.weight), None, **block.sizes
    )
    assert block.flops() == 2 * float(ones.double().sum())


def test_floor_of_a_published_shape() -> None:
    case = next(case for case in _native.published() if case["name"] == "kb2-61")
    block = Block(case, device="meta")
    floors = [compare_cudnn.floor_ms(block, precision) for precision in ("ieee", "tf32", "bf16")]
    assert floors == pytest.approx([1.95, 0.65, 0.33], abs=0.01)


def test_an_oracle_sees_errors_in_both_samples_and_nan() -> None:
    block = Block(TABLE["batch-5"])
    oracle = compare_cudnn.Oracle(block)
    good = block.run_torch(block.input)
    assert oracle.errors(good)[0] < 1e-6
    for sample in (0, -1):
        wrong = good.clone()
        wrong[sample, 0, 0, 0, 0] += 1
        norm, largest = oracle.errors(wrong)
        assert norm > 1e-3
        assert largest == pytest.approx(1, rel=1e-4)
        wrong[sample, 0, 0, 0, 0] = math.nan
        assert all(math.isnan(error) for error in oracle.errors(wrong))


def test_short_calls_are_repeated_and_rotated() -> None:
    assert [calls_in_sample(ms) for ms in (0.0, 0.1, 0.4, 70.0)] == [20, 5, 1, 1]
    assert copies_to_defeat(60, 61) == 1
    assert copies_to_defeat(60, 10) == 12
    assert copies_to_defeat(0, 10) == 1


def test_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # And back afterwards.
    path = tmp_path / "out.json"
    common = ["--device", "cpu", "--seconds", "0", "--json", str(path), "--shapes", *SMALL[:2]]
    assert compare_cudnn.main(common) == 0
    report = json.loads(path.read_text())
    assert {"gpu", "driver", "torch", "cudnn", "cuda", "commit", "date"} <= report["meta"].keys()
    assert len(report["rows"]) == 2 * 3 * 2
    for row in report["rows"]:
        assert {row["op"], row["layout"]} <= {"conv", "ncdhw", "ndhwc"}
        for key in ("volup_ms", "best_ms", "default_ms", "floor_ms", "rel_err", "max_abs_err"):
            assert row[key] > 0, key

    assert compare_cudnn.main([*common, "--budget", "-1"]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert all(row["failure"] == "no time left" for row in rows)


def test_a_wrong_result_fails_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    honest = Block.run_volup

    def lie(block: Block, input: torch.Tensor, precision: str | None = None) -> torch.Tensor:
        if input.dtype == torch.bfloat16:
            raise RuntimeError("no kernel")
        return honest(block, input, precision) * (1.001 if input.is_contiguous() else 1)

    monkeypatch.setattr(Block, "run_volup", lie)
    path = tmp_path / "out.json"
    command = ["--device", "cpu", "--seconds", "0", "--json", str(path)]
    assert compare_cudnn.main([*command, "--shapes", "k3", "--precisions", "ieee", "bf16"]) == 1
    failures = [row.get("failure") for row in json.loads(path.read_text())["rows"]]
    assert failures[0].startswith("rel_err 1.0e-03 exceeds")
    assert failures[1:] == [None, "no kernel", "no kernel"]
    assert "FAILED: no kernel" in capsys.readouterr().out


def test_training_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [TABLE[name] for name in SMALL[2:]]
    path = tmp_path / "out.json"
    options = ["--no-compile", "--seconds", "0", "--json", str(path)]
    args = training.arguments(options)
    assert training_cuda.run(cases, CpuClock(), args) == 0
    report = json.loads(path.read_text())
    assert {"gpu", "driver", "torch", "cudnn", "commit", "date"} <= report["meta"].keys()
    assert len(report["rows"]) == 2 * 3 * 2
    for row in report["rows"]:
        for key in ("volup_ms", "save_ms", "eager_ms", "best_ms", "worst", "rel_err"):
            assert row[key] > 0, key
        assert row["best_how"].startswith("eager")
    assert "geometric mean tf32" in capsys.readouterr().out


def test_wrong_gradients_fail_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = training_cuda.Step.gradients

    def lie(step: training_cuda.Step, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients = honest(step, input)
        with torch.no_grad():
            # A single element of the weight's gradient.
            gradients[1][1, 2, 0, 1, 0] *= 1.001 if input.is_contiguous() else math.nan
        return gradients

    monkeypatch.setattr(training_cuda.Step, "gradients", lie)
    args = training.arguments(["--no-compile", "--seconds", "0", "--precisions", "ieee"])
    assert training_cuda.run([TABLE[SMALL[3]]], CpuClock(), args) == 1
    assert capsys.readouterr().out.count("FAILED: an error is") == 2
