"""`pytorch_model.bin`, whole and in shards; what is no such file, or holds code, is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.weights import load_decoder

CPU = torch.device("cpu")


def load(folder: Path) -> Decoder:
    return load_decoder(folder, load_model_config(folder), dtype=torch.float32, device=CPU)


@pytest.fixture
def stored(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> Callable[..., tuple[Path, dict[str, torch.Tensor]]]:
    """A folder with a config alone, and the tensors that belong to it."""

    def make(family: str = "qwen2") -> tuple[Path, dict[str, torch.Tensor]]:
        source = tiny_checkpoint(family)
        shutil.copy(source / "config.json", tmp_path)
        return tmp_path, load_file(source / "model.safetensors")

    return make


def same(one: Decoder, other: Decoder) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("form", ["one", "old", "sharded", "wrapped"])
def test_has_the_same_weights_as_safetensors(
    stored: Callable[..., Any], tiny_checkpoint: Callable[..., Path], form: str
) -> None:
    folder, tensors = stored()
    if form == "sharded":
        names = list(tensors)
        files = {name: f"pytorch_model-{i % 3}.bin" for i, name in enumerate(names)}
        for file in set(files.values()):
            torch.save({n: tensors[n] for n in names if files[n] == file}, folder / file)
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": files}))
    else:
        content = {"state_dict": tensors} if form == "wrapped" else tensors
        target = folder / "pytorch_model.bin"
        torch.save(content, target, _use_new_zipfile_serialization=form != "old")
    assert same(load(folder), load(tiny_checkpoint("qwen2")))


class Calls:
    """Its pickle asks for a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("called",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_refused_and_not_run(
    stored: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    folder, tensors = stored()
    monkeypatch.chdir(folder)
    content, target = {**tensors, "extra": Calls()}, folder / "pytorch_model.bin"
    torch.save(content, target, _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin is a pickle that calls code \(posix\.mkdir\)"
    ):
        load(folder)
    assert not (folder / "called").exists()


def test_what_is_no_such_file_is_refused(stored: Callable[..., Any]) -> None:
    folder, tensors = stored()
    file = folder / "pytorch_model.bin"
    torch.save(tensors, file)
    whole = file.read_bytes()
    torch.save([1, 2], file)
    for content, reason in (
        (file.read_bytes(), "holds a list; it must hold tensors by name"),
        (whole[: len(whole) // 2], "only a part of one"),
        (b"", "only a part of one"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"pytorch_model\.bin .*{reason}"):
            load(folder)


def test_a_tensor_of_another_shape_or_none_is_named(stored: Callable[..., Any]) -> None:
    folder, tensors = stored()
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, reason in (
        ({name: tensors[name][:3]}, rf"pytorch_model\.bin: tensor {name} has shape \(3, 64\)"),
        ({name: tensors[name].int()}, rf"tensor {name} is torch\.int32; supported are float32"),
        ({"model.extra": torch.ones(1)}, r"has unexpected tensors: model\.extra"),
    ):
        torch.save(tensors | changed, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=reason):
            load(folder)
    del tensors[name]
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"lacks tensors: {name}"):
        load(folder)


def test_an_index_names_files_beside_it(stored: Callable[..., Any]) -> None:
    folder, tensors = stored()
    for name in ("../elsewhere.bin", "absent.bin"):
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
        with pytest.raises(ValueError, match=r"must lie beside it|absent\.bin does not exist"):
            load(folder)
