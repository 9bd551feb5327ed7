"""Makes a folder of a GGUF file: its config, tokenizer and chat template, and links to its weights.

What is around the weights is written once, by transformers' readers, into the user's cache; all
that reads a checkpoint then finds a folder. A process without torch, such as a server's, has
another do it: that needs torch, and seconds.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coppice.runtime.model.files.formats import GGUF_ARCHITECTURES
from coppice.runtime.model.files.gguf.metadata import completed, fields
from coppice.runtime.model.files.gguf.package import gguf_package, opened

#: Of such a folder the file with the types of the matrices in the GGUF files, a list.
TYPES = "gguf_types.json"
#: Why there is no tokenizer in such a folder, where transformers did not read it.
NO_TOKENIZER = "no_tokenizer.txt"
_FORM = 2  # of the folders; older ones are made anew
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def folder_around(file: Path) -> Path:
    """The folder of a model that a GGUF file holds, made now or before.

    Of a file in parts any part may be given. Raises ValueError, naming the file, for what cannot be
    read.
    """
    gguf_package(file)
    parts = _parts(file)
    root, lasting = _cache()
    seen = [(str(part.absolute()), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    mark = hashlib.sha256(repr((_FORM, version("transformers"), seen)).encode()).hexdigest()[:16]
    folder = root / f"{parts[0].stem}-{mark}"
    if lasting and folder.is_dir():
        return folder
    made = Path(tempfile.mkdtemp(prefix=".", dir=root))
    try:
        if "torch" in sys.modules:
            write_around(parts, made)
        else:
            _elsewhere(parts, made)
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def file_within(folder: Path) -> Path | None:
    """The (first) GGUF file around which a folder was made, where it lies; None for other folders.

    This is the name by which people know it.
    """
    if not (folder / TYPES).is_file():
        return None
    return next((Path(os.readlink(each)) for each in sorted(folder.glob("*.gguf"))), None)


def write_around(parts: list[Path], folder: Path) -> None:
    """Writes the files around the weights into a folder, and links to the weights."""
    from transformers import AutoConfig, AutoTokenizer

    readers = [opened(part) for part in parts]
    for part in parts:
        (folder / part.name).symlink_to(part.absolute())
    matrices = [each for reader in readers for each in reader.tensors if len(each.shape) > 1]
    types = sorted({each.tensor_type.name for each in matrices})
    (folder / TYPES).write_text(json.dumps(types), encoding="utf-8")
    first = parts[0]
    try:
        found = fields(readers)
    except ValueError as error:  # such as bytes that are no text
        raise ValueError(f"{first} is a broken GGUF file: {error}") from error
    _check_architecture(found, first)
    try:
        raw = AutoConfig.from_pretrained(folder, gguf_file=first.name).to_dict()
        config = completed(raw, readers, first)
    except Exception as error:  # there is a type for each field that lacks, or is not a number
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        if reason.startswith(str(first)):
            raise
        raise ValueError(
            f"{first}: transformers cannot read its config: {' '.join(reason.split())}. Take "
            "another conversion of the model, or a folder or hub id in Hugging Face's form"
        ) from error
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    try:
        if "tokenizer.ggml.model" not in found:
            raise ValueError("it holds none")
        AutoTokenizer.from_pretrained(folder, gguf_file=first.name).save_pretrained(folder)
    except Exception as error:  # --tokenizer may name another
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        (folder / NO_TOKENIZER).write_text(" ".join(reason.split()), encoding="utf-8")


def _check_architecture(found: Mapping[str, Any], file: Path) -> None:
    named = found.get("general.architecture")
    if named not in GGUF_ARCHITECTURES:
        kind = found.get("general.type", "model")
        what = "" if kind == "model" else f" ({kind})"
        raise ValueError(
            f"{file} holds {named!r}{what}; GGUF files are read of the architectures "
            f"{', '.join(GGUF_ARCHITECTURES)}. Take the model as a folder or hub id in Hugging "
            "Face's form"
        )


def _elsewhere(parts: list[Path], folder: Path) -> None:
    """The same in a process of its own."""
    command = [sys.executable, "-m", __name__, str(folder), *map(str, parts)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        lines = ran.stderr.strip().splitlines()
        raise ValueError(lines[-1] if lines else f"{parts[0]} could not be read")


def _parts(file: Path) -> list[Path]:
    """All files of a model that is stored in several, which number themselves."""
    numbered = _PART.search(file.name)
    if numbered is None:
        return [file]
    stem, count = file.name[: numbered.start()], int(numbered[2])
    parts = [file.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise ValueError(f"{file} is one of {count} files of a model; {missing[0]} is missing")
    return parts


def _cache() -> tuple[Path, bool]:
    """Where folders are made, and whether they last: in the user's cache if it can be written."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(base) / "coppice" / "around"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root, True
    except OSError:
        made = Path(tempfile.mkdtemp(prefix="coppice-"))
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        return made, False


if __name__ == "__main__":
    try:
        write_around([Path(each) for each in sys.argv[2:]], Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error).replace("\n", " "))
