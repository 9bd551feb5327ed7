"""Says why a folder or a file holds no model that can be loaded, where the reason is a common one.

People give the folder of an adapter, a clone whose large files git-lfs never fetched,
or the parent of the right folder. What reads the files would report a key or a byte.
"""

from __future__ import annotations

import json
from pathlib import Path

from coppice.runtime.model.files.gguf.around import NO_TOKENIZER, file_within

_LFS = b"version https://git-lfs.github.com/spec/"
_CONFIG = "config.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "spiece.model", "tekken.json",
)  # fmt: skip


def not_a_folder(model: str, path: Path) -> str:
    """Why the file at `path`, given as a model, is none."""
    if path.suffix in (".safetensors", ".bin", ".json"):
        return f"model is {model!r}, one file of a checkpoint; give its folder, {path.parent}"
    return f"model is {model!r}, a file; it must be a folder or a hub id"


def check_model_folder(path: Path, *, weights: bool = True) -> None:
    """Raises ValueError with the reason for a folder that holds no checkpoint.

    With `weights` the files of the weights must be there, too, and not be pointers to them.
    """
    config = path / _CONFIG
    if not config.is_file():
        raise ValueError(f"model: {path} has no {_CONFIG}: {_instead(path)}")
    stored = [file for kind in _WEIGHTS for file in sorted(path.glob(kind))] if weights else []
    for file in (config, *stored):
        check_not_a_pointer(file)


def check_tokenizer_folder(path: Path) -> None:
    """Raises ValueError with the reason for a folder that holds no tokenizer."""
    found = [path / name for name in _TOKENIZERS if (path / name).is_file()]
    for file in found:
        check_not_a_pointer(file)
    gguf = file_within(path)
    if not found and gguf is not None:
        note = path / NO_TOKENIZER
        reason = note.read_text(encoding="utf-8") if note.is_file() else "it holds none"
        raise ValueError(
            f"tokenizer cannot be loaded from {gguf}: {reason}; name the folder or hub id of one "
            "with tokenizer (--tokenizer)"
        )
    vocabularies = [file for file in found if file.name != "tokenizer_config.json"]
    if not vocabularies:
        lacks = "has a tokenizer_config.json, but no tokenizer.json" if found else "has none"
        raise ValueError(
            f"tokenizer cannot be loaded from {path}, which {lacks}; name the folder or hub id of "
            "one with tokenizer (--tokenizer)"
        )


def check_not_a_pointer(file: Path) -> None:
    """Raises ValueError for the few lines that git-lfs puts in place of a file."""
    try:
        with file.open("rb") as content:
            pointer = content.read(len(_LFS)) == _LFS
    except OSError:
        return  # what reads the whole file reports it
    if pointer:
        raise ValueError(
            f"{file} is a pointer of Git LFS, not the file itself: run `git lfs pull` in "
            f"{file.parent}, or download it with `hf download`"
        )


def _instead(path: Path) -> str:
    """What a folder without a config.json is, as far as its files show it."""
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        return (
            f"it is an adapter{_base(adapter)}; give the folder of its base model, and the adapter "
            "as lora_modules (--lora-modules NAME=FOLDER) or as lora_request"
        )
    if (path / "params.json").is_file():
        return (
            "it holds weights in the form of their publisher (params.json); give the folder in "
            "Hugging Face's form, which has a config.json"
        )
    within = sorted(
        file.parent for pattern in ("*", "*/*") for file in path.glob(f"{pattern}/{_CONFIG}")
    )
    if within:
        return f"give one of the folders in it that have one, such as {within[0]}"
    if not any(path.iterdir()):
        return "it is empty"
    return "it holds no checkpoint in Hugging Face's form"


def _base(adapter: Path) -> str:
    try:
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f" for {base!r}"
