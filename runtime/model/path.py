"""Where a model is: a local folder, or a Hugging Face hub id that is fetched."""

from __future__ import annotations

from pathlib import Path


def resolve_model(model: str) -> Path:
    """The folder of ``model``: a local folder, else a Hugging Face hub id, fetched or cached.

    Of a hub repository only safetensors, JSON, tokenizer and template files are fetched. Raises
    ``ValueError`` if there is no such folder and the hub does not give one.
    """
    if not model:
        raise ValueError("model is ''; it must be a folder or a Hugging Face hub id")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"model is {model!r}, a file; it must be a folder or a hub id")
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ValueError(f"model is {model!r}; there is no such folder, and it is no hub id")
    from huggingface_hub import snapshot_download  # a quarter of a second, which folders don't need

    try:
        folder = snapshot_download(
            model,
            allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"],
            ignore_patterns=["original/*", "consolidated*"],
        )
    except Exception as error:  # offline, unknown, gated, no space: the hub has a type for each
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"model is {model!r}; there is no such folder here, and the Hugging Face hub did not "
            f"give it: {type(error).__name__}: {reason[0] if reason else ''}"
        ) from error
    return Path(folder)
