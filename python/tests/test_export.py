"""Decoder files: written, read again, and run by the command line."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import volup

CLI = os.environ.get("VOLUP_CLI")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def blocks() -> list[volup.nn.ConvTranspose3dBlock]:
    torch.manual_seed(0)
    made = [
        volup.nn.ConvTranspose3dBlock(1, 8, 3, 1, 1, norm_groups=4),
        volup.nn.ConvTranspose3dBlock(
            8,
            8,
            (3, 4, 2),
            2,
            (1, 1, 0),
            (1, 0, 0),
            2,
            False,
            activation=("leaky_relu", 0.2),
            norm_groups=2,
            eps=1e-3,
            affine=False,
            post_activation="gelu_tanh",
        ),
        volup.nn.ConvTranspose3dBlock(8, 1, 3, 1, 1, activation=None),
    ]
    for block in made:
        if block.norm is not None and block.norm.affine:
            nn.init.normal_(block.norm.weight)
            nn.init.normal_(block.norm.bias)
    return made


def header(path: Path) -> dict:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "decoder.safetensors"
    volup.export(volup.nn.Decoder(*blocks(), skip="trilinear", normalize="max"), path)
    tensors = header(path)
    description = json.loads(tensors.pop("__metadata__")["volup"])
    assert description["format"] == "volup-decoder"
    assert description["version"] == 1
    assert description["skip"] == "trilinear"
    assert description["normalize"] == "max"
    assert description["blocks"][1] == {
        "name": "blocks.1",
        "in_channels": 8,
        "out_channels": 8,
        "kernel_size": [3, 4, 2],
        "stride": [2, 2, 2],
        "padding": [1, 1, 0],
        "output_padding": [1, 0, 0],
        "groups": 2,
        "dilation": [1, 1, 1],
        "bias": False,
        "activation": ["leaky_relu", 0.2],
        "norm_groups": 2,
        "eps": 1e-3,
        "affine": False,
        "post_activation": "gelu_tanh",
    }
    assert {name: entry["shape"] for name, entry in tensors.items()} == {
        "blocks.0.conv.weight": [1, 8, 3, 3, 3],
        "blocks.0.conv.bias": [8],
        "blocks.0.norm.weight": [8],
        "blocks.0.norm.bias": [8],
        "blocks.1.conv.weight": [8, 4, 3, 4, 2],
        "blocks.2.conv.weight": [8, 1, 3, 3, 3],
        "blocks.2.conv.bias": [1],
    }
    assert {entry["dtype"] for entry in tensors.values()} == {"F32"}
    assert os.listdir(tmp_path) == ["decoder.safetensors"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "decoder.safetensors"
    model = volup.nn.Decoder(*blocks(), skip="trilinear", normalize="max").to(dtype)
    volup.export(model, str(path))
    loaded = volup.nn.Decoder.load(path)
    assert repr(loaded) == repr(model)
    state = model.state_dict()
    assert list(loaded.state_dict()) == list(state)
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, state[name])
    input = torch.randn(1, 1, 3, 4, 5).to(dtype)
    with torch.no_grad():
        assert torch.equal(loaded(input), model(input))


def test_chains_of_pytorchs_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose3d(2, 4, 3),
        nn.ReLU(),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.ConvTranspose3d(4, 6, 2, 2, bias=False),
        nn.InstanceNorm3d(6),
        nn.LeakyReLU(0.2),
        volup.nn.ConvTranspose3dBlock(6, 4, 3, norm_groups=1),
        nn.ConvTranspose3d(4, 3, 1),
    )
    input = torch.randn(2, 2, 3, 4, 5)
    for chain in (model, volup.nn.Sequential(*model)):
        volup.export(chain, tmp_path / "chain")
        loaded = volup.nn.Decoder.load(tmp_path / "chain")
        assert len(loaded.blocks) == 4
        with torch.no_grad():
            torch.testing.assert_close(loaded(input), model(input), rtol=1e-4, atol=1e-4)
    volup.optimize(model)
    volup.export(model, tmp_path / "optimized")
    assert (tmp_path / "optimized").read_bytes() == (tmp_path / "chain").read_bytes()


def test_one_block(tmp_path: Path) -> None:
    block = volup.nn.ConvTranspose3dBlock(2, 4, 3, norm_groups=2)
    block.conv.weight.data = block.conv.weight.data.to(memory_format=torch.channels_last_3d)
    volup.export(block, tmp_path / "block")
    input = torch.randn(1, 2, 3, 3, 3)
    with torch.no_grad():
        loaded = volup.nn.Decoder.load(tmp_path / "block")(input)
        torch.testing.assert_close(loaded, block(input))


def test_a_norm_without_a_bias(tmp_path: Path) -> None:
    norm = nn.GroupNorm(2, 4)
    norm.bias = None
    nn.init.normal_(norm.weight)
    model = nn.Sequential(nn.ConvTranspose3d(2, 4, 3), norm)
    volup.export(model, tmp_path / "chain")
    input = torch.randn(1, 2, 3, 3, 3)
    with torch.no_grad():
        loaded = volup.nn.Decoder.load(tmp_path / "chain")(input)
        torch.testing.assert_close(loaded, model(input), rtol=1e-4, atol=1e-4)


def test_refuses(tmp_path: Path) -> None:
    path = tmp_path / "decoder"
    conv, block = nn.ConvTranspose3d, volup.nn.ConvTranspose3dBlock
    with pytest.raises(TypeError, match="not ConvTranspose3d"):
        volup.export(conv(1, 1, 3), path)
    with pytest.raises(TypeError, match="module 1 of the Sequential begins no block: Conv3d"):
        volup.export(nn.Sequential(conv(1, 1, 3), nn.Conv3d(1, 1, 1)), path)
    with pytest.raises(ValueError, match="in_channels must be 2"):
        volup.export(nn.Sequential(conv(1, 2, 3), conv(3, 1, 3)), path)
    with pytest.raises(ValueError, match="float"):
        volup.export(nn.Sequential(conv(1, 2, 3), conv(2, 1, 3).double()), path)
    with pytest.raises(ValueError, match="at least one block"):
        volup.export(nn.Sequential(), path)
    with pytest.raises(ValueError, match="whole multiple"):
        volup.export(volup.nn.Decoder(block(1, 1, 3), skip="trilinear"), path)
    with pytest.raises(RuntimeError, match="meta"):
        volup.export(block(1, 1, 3, device="meta"), path)
    assert not path.exists()
    with pytest.raises(OSError, match="missing"):
        volup.export(block(1, 1, 3), tmp_path / "missing" / "decoder")


def test_load_refuses(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        volup.nn.Decoder.load(tmp_path / "missing")
    path = tmp_path / "broken"
    path.write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match="volup"):
        volup.nn.Decoder.load(path)


@pytest.mark.skipif(CLI is None, reason="VOLUP_CLI does not name the command line's binary")
@pytest.mark.parametrize("skip", [None, "trilinear"])
@pytest.mark.parametrize("normalize", [None, "max"])
def test_the_command_line_computes_the_same(tmp_path: Path, skip, normalize) -> None:
    torch.manual_seed(0)
    model = volup.nn.Decoder(
        volup.nn.ConvTranspose3dBlock(1, 8, 3, 1, 1, norm_groups=4),
        volup.nn.ConvTranspose3dBlock(8, 1, 4, 2, 1, activation=None),
        skip=skip,
        normalize=normalize,
    )
    volup.export(model, tmp_path / "decoder.safetensors")
    volume = (5 * torch.rand(6, 7, 8)).numpy()
    np.save(tmp_path / "in.npy", volume)
    command = [CLI, "run", "--decoder", "decoder.safetensors", "in.npy", "out.npy"]
    subprocess.run(command, cwd=tmp_path, check=True)
    with torch.no_grad():
        expected = model(torch.from_numpy(volume)[None])[0]
    got = torch.from_numpy(np.load(tmp_path / "out.npy"))
    torch.testing.assert_close(got.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)
