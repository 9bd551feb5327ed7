"""Finds the `config.json` of a model without its weights."""

from __future__ import annotations

from pathlib import Path

from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.config_file import has_family, load_model_config, read_config
from coppice.runtime.model.files.folder import check_model_folder, not_a_folder
from coppice.runtime.model.files.path import resolve_model


def find_config(model: str, revision: str | None = None) -> Path:
    """The folder of the `config.json` of a model: of a folder, a file, or a hub id.

    The file may be the `config.json` or a GGUF file; of a hub's repository only `config.json` is
    fetched. Raises ``ValueError`` for what is none of these.
    """
    path = Path(model).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if path.is_dir() or (path.suffix.lower() == ".gguf" and path.is_file()):
        path = resolve_model(str(path), revision)  # which makes a folder around a GGUF file
    if not path.is_dir():
        if path.exists():
            raise ValueError(not_a_folder(model, path))
        if not model or model.startswith(("/", ".", "~")) or model.count("/") > 1:
            raise ValueError(
                f"model is {model!r}; there is no such folder or config.json, and it is no hub id"
            )
        return _fetched(model, revision)
    check_model_folder(path, weights=False)
    return path


def read_model(path: Path) -> ModelConfig:
    """The model of a folder. Raises ``ValueError`` as ``load_model_config`` does."""
    raw = read_config(path)
    if not has_family(raw):
        raise ValueError(
            f"model_type is {raw['model_type']!r}; plans are made for the families that "
            "`coppice models` lists. Others may still run: through transformers, if it has them"
        )
    return load_model_config(path)


def _fetched(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download  # a quarter of a second, which folders don't need

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision)).parent
    except Exception as error:  # offline, unknown, gated: the hub has a type for each
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"model is {model!r}; there is no such folder here, and the Hugging Face hub did not "
            f"give its config.json: {type(error).__name__}: {reason[0] if reason else ''}"
        ) from error
