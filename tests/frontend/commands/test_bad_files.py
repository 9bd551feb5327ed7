"""Commands that get a broken checkpoint: one clear line that names the file, and no traceback."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coppice.frontend.commands.main import main

WEIGHTS = "model.safetensors"


class Code:
    """What a pickle would call when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("called"),)


def cut(folder: Path) -> str:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1000])
    return WEIGHTS


def lacking(folder: Path) -> str:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / WEIGHTS)
    return "model.norm.weight"


def other_shape(folder: Path) -> str:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, folder / WEIGHTS)
    return "model.norm.weight"


def pickle_with_code(folder: Path) -> str:
    (folder / WEIGHTS).unlink()
    torch.save({"model.norm.weight": Code()}, folder / "pytorch_model.bin")
    return "pytorch_model.bin"


def unknown_quantization(folder: Path) -> str:
    config = folder / "config.json"
    text = config.read_text().rstrip()
    config.write_text(text[:-1] + ', "quantization_config": {"quant_method": "of_tomorrow"}}')
    return "of_tomorrow"


def part_of_gguf(folder: Path) -> str:
    (folder / "part.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(range(200)))
    return "part.gguf"


SPOILT = [cut, lacking, other_shape, pickle_with_code, unknown_quantization, part_of_gguf]


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize(
    ("command", "spoil"),
    # A server starts a process for its engine, which takes seconds.
    [*(("generate", each) for each in SPOILT), ("serve", cut), ("serve", part_of_gguf)],
)
def test_a_broken_checkpoint(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    spoil: Callable[[Path], str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    named = spoil(model)
    if named.endswith(".gguf"):
        model /= named
    more = {"generate": ["--prompt", "The key"], "serve": ["--port", "0"]}[command]
    assert main([command, str(model), *more]) in (1, 2)
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err
    assert named in printed.err.splitlines()[-1]
    assert not (tmp_path / "called").exists()
