"""Where a model is: a local folder, or a Hugging Face hub id that is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coppice.runtime.model.files.folder import check_not_a_pointer, not_a_folder
from coppice.runtime.model.files.gguf.around import folder_around


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The folder of ``model``: a local one, else a Hugging Face hub id, fetched or cached.

    Of a GGUF file, or a folder with one and no config, it is a folder made around that file.
    ``revision`` is a branch, tag or commit of the hub's repository, of which only weights, JSON,
    tokenizer and template files are fetched: safetensors, else ``pytorch_model.bin``. Raises
    ``ValueError`` if there is no such folder and the hub does not give one.
    """
    if not model:
        raise ValueError("model is ''; it must be a folder or a Hugging Face hub id")
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        if revision is not None:
            raise ValueError(
                f"revision must not be given with a folder or a file; got {revision!r} "
                f"with {model!r}"
            )
        return _with_config(path)
    if path.exists():
        raise ValueError(not_a_folder(model, path))
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ValueError(f"model is {model!r}; there is no such folder, and it is no hub id")
    from huggingface_hub import snapshot_download  # a quarter of a second, which folders don't need

    around = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
    others = ["original/*", "consolidated*"]
    more: dict[str, Any] = {"revision": revision, "ignore_patterns": others}
    try:
        folder = snapshot_download(model, allow_patterns=["*.safetensors", *around], **more)
        if not any(Path(folder).glob("*.safetensors")):
            snapshot_download(model, allow_patterns=["pytorch_model*.bin"], **more)
    except Exception as error:  # offline, unknown, gated, no space: the hub has a type for each
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"model is {model!r}; there is no such folder here, and the Hugging Face hub did not "
            f"give it: {type(error).__name__}: {reason[0] if reason else ''}"
        ) from error
    return Path(folder)


def _with_config(path: Path) -> Path:
    """The folder, or that around the one GGUF file that it is or holds."""
    if path.is_dir():
        files = sorted(each for each in path.glob("*.gguf") if not each.name.startswith("mmproj"))
        if (path / "config.json").is_file() or not files:
            return path
        first = [each for each in files if "-of-" not in each.name or "-00001-of-" in each.name]
        if len(first) != 1:
            raise ValueError(
                f"model: {path} has no config.json and {len(files)} GGUF files; give the path of "
                f"one of them, such as {files[0]}"
            )
        path = first[0]
    check_not_a_pointer(path)
    return folder_around(path)
