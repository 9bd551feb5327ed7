"""Where a model is: a local folder, or a Hugging Face hub id that is fetched."""

from __future__ import annotations

from pathlib import Path

from coppice.runtime.model.files.folder import not_a_folder


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The folder of ``model``: a local folder, else a Hugging Face hub id, fetched or cached.

    ``revision`` is a branch, tag or commit of the hub's repository, of which only safetensors,
    JSON, tokenizer and template files are fetched. Raises ``ValueError`` if there is no such folder
    and the hub does not give one.
    """
    if not model:
        raise ValueError("model is ''; it must be a folder or a Hugging Face hub id")
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(
                f"revision must not be given with a folder, which has none; got {revision!r} "
                f"with {model!r}"
            )
        return path
    if path.exists():
        raise ValueError(not_a_folder(model, path))
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ValueError(f"model is {model!r}; there is no such folder, and it is no hub id")
    from huggingface_hub import snapshot_download  # a quarter of a second, which folders don't need

    try:
        folder = snapshot_download(
            model,
            revision=revision,
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
