"""What a `quantization_config` says of a checkpoint; what is not read is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coppice.runtime.model.files.formats import STORED

Form = Literal["awq", "gptq", "scaled"]
_READ = f"{', '.join(STORED[:-1])} and {STORED[-1]}"
_BYTES = ("int-quantized", "float-quantized", "naive-quantized")
_FORMATS = ("pack-quantized", *_BYTES, "dense")
_REMEDY = "take the unquantised checkpoint (quantization='int8' then makes 8 bits of it)"


@dataclass(frozen=True, slots=True)
class Method:
    """How the weights of a checkpoint are stored.

    Attributes:
        name: for people.
        form: which tensors make a weight: those of AWQ, of GPTQ, or a weight with its scales.
        bits: of a number; where tensors show it themselves, that counts.
        zeros_less_one: whether zero points are stored less one, as GPTQ's first version does.
        block: rows and columns that share a scale, where there are scales of blocks.
        eight_bit: whether its weights are stored for products of 8 bits.
        group: inputs that share a scale; None: the tensors show it, as it is for whole rows.
    """

    name: str
    form: Form
    bits: int
    zeros_less_one: bool = False
    block: tuple[int, int] = (128, 128)
    eight_bit: bool = False
    group: int | None = None


def read_method(folder: Path) -> Method | None:
    """The method of the checkpoint in a folder; None for plain weights, and for MXFP4.

    Families that are published in MXFP4 decode it themselves. Raises ValueError that names the
    method, and what to do, for what is not read.
    """
    file = folder / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    given, older = raw.get("quantization_config"), folder / "quantize_config.json"
    if given is None and older.is_file():  # as AutoGPTQ wrote it first
        file, given = older, {"quant_method": "gptq", **json.loads(older.read_text())}
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"quantization_config in {file} is {given!r:.80}; it must be an object")
    return method_of(given, file)


def method_of(given: Mapping[str, Any], file: Path) -> Method | None:
    """The method that a `quantization_config` describes."""
    name = given.get("quant_method")
    bits = given.get("bits", given.get("w_bit", 4))
    if name == "mxfp4":
        return None
    if name == "awq":
        version = str(given.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise _refusal(file, f"awq of {bits!r} bits in version {version!r}", "4 bits, gemm")
        return Method("AWQ, 4 bits", "awq", 4, group=_group(given, file))
    if name == "gptq":
        layout = given.get("checkpoint_format", "gptq")
        if bits not in (2, 4, 8) or layout not in ("gptq", "gptq_v2"):
            found = f"gptq of {bits!r} bits in checkpoint_format {layout!r}"
            raise _refusal(file, found, "2, 4 or 8 bits, gptq or gptq_v2")
        less = layout == "gptq"
        group = _group(given, file)
        return Method(f"GPTQ, {bits} bits", "gptq", bits, zeros_less_one=less, group=group)
    if name == "compressed-tensors":
        return _compressed(given, file)
    if name in ("fp8", "fbgemm_fp8"):
        block = given.get("weight_block_size") or (128, 128)
        if len(block) != 2 or not all(isinstance(each, int) and each > 0 for each in block):
            raise ValueError(f"weight_block_size in {file} is {block!r}; it must be two sizes")
        return Method("FP8", "scaled", 8, block=(block[0], block[1]), eight_bit=True)
    raise _refusal(file, f"quant_method {name!r}", _READ)


def _compressed(given: Mapping[str, Any], file: Path) -> Method:
    groups = given.get("config_groups") or {}
    formats = {given.get("format")} | {group.get("format") for group in groups.values()}
    unknown = sorted(str(each) for each in formats - {None, *_FORMATS})
    if unknown:
        raise _refusal(
            file, f"the format {unknown[0]!r} of compressed-tensors", ", ".join(_FORMATS)
        )
    if given.get("transform_config"):
        raise _refusal(file, "a transform_config", "checkpoints without one")
    sparse = (given.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise _refusal(file, f"weights of sparsity_config {sparse!r}", "dense ones")
    weights = [group.get("weights") or {} for group in groups.values()]
    bits = {each.get("num_bits", 8) for each in weights} or {8}
    if not bits <= {4, 8}:
        raise _refusal(file, f"weights of {sorted(bits)} bits", "4 and 8 bits")
    kinds = {each.get("type", "int") for each in weights}
    kind = "FP8" if "float" in kinds else f"{min(bits)} bits"
    block = next((each["block_structure"] for each in weights if each.get("block_structure")), None)
    rows, columns = block or (128, 128)
    sizes = {_group(each, file) for each in weights}
    named = formats - {None}
    return Method(
        f"compressed-tensors, {kind}",
        "scaled",
        min(bits),
        block=(rows, columns),
        eight_bit=bool(named) and named <= {*_BYTES},
        group=sizes.pop() if len(sizes) == 1 else None,
    )


def _group(given: Mapping[str, Any], file: Path) -> int | None:
    """The inputs that share a scale; None for whole rows, and where nothing is said."""
    size = given.get("group_size", given.get("q_group_size"))
    if size is None or size == -1:
        return None
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"group_size in {file} is {size!r}; it must be -1 or at least 1")
    return size


def _refusal(file: Path, found: str, read: str) -> ValueError:
    return ValueError(
        f"quantization_config in {file} has {found}, which is not read; {read} are: {_REMEDY}"
    )
