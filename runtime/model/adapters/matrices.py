"""An adapter's matrices, read from the file in which PEFT saves them, checked against a model."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file

from coppice.runtime.model.adapters.projections import Part, parts_of, why_not
from coppice.runtime.model.adapters.settings import CONFIG_FILE, AdapterSettings, read_settings
from coppice.runtime.model.config import ModelConfig

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight"
)
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The matrices of one part of a projection: it gets ``(x A^T) B^T``, with A and B as below.

    Attributes:
        part: of which projection.
        down: A, float32 ``[rank, inputs]``.
        up: the transposed B times the adapter's scale, float32 ``[rank, outputs]``.
    """

    part: Part
    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFiles:
    """An adapter as it was read.

    Attributes:
        pieces: its matrices, one for each part that it changes.
        digest: of its files' contents, in hexadecimal.
        invocation: the tokens that invoke it; None: it acts on all.
    """

    pieces: tuple[Piece, ...]
    digest: str
    invocation: tuple[int, ...] | None


def read_adapter(folder: Path, config: ModelConfig, max_rank: int) -> AdapterFiles:
    """Reads an adapter for the model that ``config`` describes.

    Raises ``ValueError`` that names the file, and the tensor or field, for what can't be read, does
    not belong to the model, is missing, has a rank above ``max_rank``, or is not supported.
    """
    settings = read_settings(folder)
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(f"{folder} has no {' or '.join(_FILES)}: an adapter's matrices are there")
    parts = parts_of(config)
    tokens = settings.invocation or ()
    if (most := max(tokens, default=0)) >= config.vocab_size:
        raise ValueError(
            f"{folder / CONFIG_FILE}: alora_invocation_tokens must be below {config.vocab_size}, "
            f"the model's vocabulary, got {most}"
        )
    wanted = {name: part for name, part in parts.items() if settings.changes(name)}
    for name in wanted:
        if (rank := settings.rank_of(name)) > max_rank:
            raise ValueError(
                f"{folder / CONFIG_FILE}: the rank of {name} (r, rank_pattern) must be at most "
                f"max_lora_rank, {max_rank}, got {rank}"
            )
    given = _matrices(file, parts, config)
    if unexpected := sorted(set(given) - set(wanted)):
        raise ValueError(
            f"{file} has unexpected tensors, of {_shown(unexpected)}, which target_modules of "
            f"{CONFIG_FILE} does not name"
        )
    if not wanted:
        has = sorted({name.rpartition(".")[2] for name in parts})
        raise ValueError(
            f"{folder / CONFIG_FILE}: target_modules names no projection of this model, "
            f"{config.architecture}, which has {_shown(has)}"
        )
    lacking = [
        f"{name}.lora_{side}.weight"
        for name in wanted
        for side in "AB"
        if side not in given.get(name, ())
    ]
    if lacking:
        raise ValueError(f"{file} lacks tensors: {_shown(lacking)}")
    pieces = tuple(_piece(file, name, part, given[name], settings) for name, part in wanted.items())
    return AdapterFiles(pieces, _digest(folder / CONFIG_FILE, file), settings.invocation)


def _matrices(
    file: Path, parts: Mapping[str, Part], config: ModelConfig
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a file by module and side, "A" or "B"."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in _tensors(file).items():
        match = _NAME.fullmatch(name)
        if match is None:
            kind = ""
            if ".lora_magnitude_vector" in name:
                kind = " (DoRA)"
            elif "lora_embedding" in name:
                kind = " (of the embedding)"
            raise ValueError(
                f"{file}: tensor {name}{kind} is not supported; supported are lora_A and lora_B "
                f"of projections"
            )
        module = match["module"]
        if module not in parts:
            raise ValueError(f"{file}: tensor {name}: {why_not(config, module)}")
        found.setdefault(module, {})[match["side"]] = tensor
    return found


def _piece(
    file: Path, name: str, part: Part, given: Mapping[str, torch.Tensor], settings: AdapterSettings
) -> Piece:
    rank = settings.rank_of(name)
    shapes = {"A": (rank, part.inputs), "B": (part.outputs, rank)}
    for side, shape in shapes.items():
        tensor, called = given[side], f"{name}.lora_{side}.weight"
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{file}: tensor {called} has shape {tuple(tensor.shape)}; {CONFIG_FILE} and this "
                f"model ask for {shape}"
            )
        if tensor.dtype not in _TYPES:
            allowed = ", ".join(str(each).removeprefix("torch.") for each in _TYPES)
            raise ValueError(f"{file}: tensor {called} is {tensor.dtype}; supported are {allowed}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{file}: tensor {called} has a number that is infinite or NaN")
    up = given["B"].float() * settings.scale_of(name)
    if part.order is not None:
        up = up[part.order]
    return Piece(part, given["A"].float(), up.t().contiguous())


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (
        SafetensorError, OSError, RuntimeError, EOFError, ValueError, KeyError,
        pickle.UnpicklingError,
    ) as error:  # fmt: skip
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"{file} cannot be read: {type(error).__name__}: {reason[0] if reason else ''}"
        ) from error
    tensor = isinstance(tensors, dict) and all(
        isinstance(each, torch.Tensor) for each in tensors.values()
    )
    if not tensor:
        raise ValueError(f"{file} must hold tensors by their names")
    return tensors


def _digest(*files: Path) -> str:
    state = xxhash.xxh3_128()
    for file in files:
        content = file.read_bytes()
        state.update(len(content).to_bytes(8, "little"))
        state.update(content)
    return state.hexdigest()


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"
