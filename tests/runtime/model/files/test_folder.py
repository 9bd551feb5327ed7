"""What is wrong with a folder or file that holds no model is said in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coppice.runtime.model.files.folder import check_model_folder, check_tokenizer_folder
from coppice.runtime.model.files.path import resolve_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "it is empty"),
        ({"notes__txt": "x"}, "holds no checkpoint"),
        (
            {"adapter_config__json": json.dumps({"base_model_name_or_path": "meta/base"})},
            r"it is an adapter for 'meta/base'; .*--lora-modules NAME=FOLDER",
        ),
        ({"adapter_config__json": "{"}, "it is an adapter; give the folder of its base"),
        ({"params__json": "{}"}, "form of their publisher"),
        ({"config__json": POINTER}, r"config\.json is a pointer of Git LFS"),
        (
            {"config__json": "{}", "model__safetensors": POINTER},
            r"model\.safetensors is a pointer of Git LFS.*git lfs pull",
        ),
    ],
)
def test_a_folder_without_a_model(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_model_folder(folder(tmp_path / "model", **files))


def test_weights_may_be_left_out_and_the_folder_within_is_named(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", config__json="{}", model__safetensors=POINTER)
    check_model_folder(model, weights=False)
    with pytest.raises(ValueError, match=f"such as {model}"):
        check_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "which has none; name the folder"),
        ({"tokenizer_config__json": "{}"}, r"but no tokenizer\.json"),
        ({"tokenizer__json": POINTER}, r"tokenizer\.json is a pointer of Git LFS"),
    ],
)
def test_a_folder_without_a_tokenizer(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_tokenizer_folder(folder(tmp_path / "model", **files))
    check_tokenizer_folder(folder(tmp_path / "other", tokenizer__json="{}"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("m.gguf", r"m\.gguf is not a GGUF file: it does not begin with GGUF"),
        ("m.safetensors", "one file of a checkpoint"),
        ("m", "a file;"),
    ],
)
def test_a_file_is_no_model(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=reason):
        resolve_model(str(tmp_path / name))


def test_a_revision_is_of_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def fetch(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model("owner/name", "v2") == tmp_path
    assert asked["revision"] == "v2"
    with pytest.raises(ValueError, match="revision must not be given with a folder or"):
        resolve_model(str(tmp_path), "v2")
