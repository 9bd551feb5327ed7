"""Fills a decoder with weights: from the files of a checkpoint, or at random."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from coppice.kernels.cpu.layer.matmul.group_products import group_kernels
from coppice.kernels.cpu.layer.matmul.grouped import BLOCK, Grouped
from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.files.opening import open_tensors
from coppice.runtime.model.files.progress import LoadingProgress
from coppice.runtime.model.files.source import Header, TensorSource, in_order
from coppice.runtime.model.layers import DTYPES, Linear
from coppice.runtime.model.linear.grouped import Int4Linear, WiderInt4Linear
from coppice.runtime.model.linear.select import linear_class
from coppice.runtime.model.parallel.division import share_of
from coppice.runtime.model.parallel.group import ALONE, RankGroup
from coppice.runtime.model.places.experts import Place
from coppice.runtime.model.places.tensors import places_of
from coppice.runtime.model.weight_size import smaller_weights, weight_bytes
from coppice.runtime.startup.room import check_room, explained, readable

logger = logging.getLogger(__name__)

#: Tensors that old checkpoints carry though they follow from the config.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def resolve_device(device: str) -> torch.device:
    """The device to compute on: ``auto`` is a GPU where torch finds one, else the CPU.

    Raises ``ValueError`` for ``cuda`` where torch finds none.
    """
    found = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not found:
        lacks = "finds no NVIDIA GPU" if torch.backends.cuda.is_built() else "is built without CUDA"
        raise ValueError(f"device is 'cuda', but torch {lacks} here; it must be 'auto' or 'cpu'")
    return torch.device("cuda" if found else "cpu")


def resolve_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The type to compute and cache in.

    ``auto`` is float32 on a CPU, whose attention kernels compute in that type (and whose 16-bit
    products are slower than 32-bit ones without bfloat16 units), elsewhere the type that the
    checkpoint declares. Other names are those of ``DTYPES``.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else config.torch_dtype
    return DTYPES[dtype]


def load_decoder(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    quantization: str | None = None,
    deterministic: bool = False,
    lossless: bool = False,
    bfloat16: bool = False,
    as_stored: bool = True,
    seed: int = 0,
    group: RankGroup = ALONE,
) -> Decoder:
    """A decoder with weights: those in ``path``, or random ones with ``load_format="dummy"``.

    Weights that are stored quantised become int8 where the checkpoint was made for products of 8
    bits, and stay in groups of 4 bits where most are stored so, with ``as_stored`` and on a device
    that has such products; else they become 16 bits where they can be kept, with ``lossless``
    float32. A line in the log says which. ``bfloat16``: products on a CPU are of bfloat16, in a
    model that is float32 otherwise (``linear_class``). Of a model that is divided among the ranks
    of ``group`` it is this rank's part.

    While loading, one tensor of the checkpoint at a time is in memory beside the decoder (of a
    `pytorch_model.bin`, what has been read of one shard). Raises ``ValueError`` that names the file
    and the tensor for weights that are missing, unexpected, wrongly shaped or of an unsupported
    type, and ``TooLittleMemory`` if they do not fit.
    """
    dummy = load_format == "dummy"
    source = None
    if not dummy:
        source = open_tensors(path, lambda: _wanted(config), lossless=lossless)
        config = _with_prefix(config, set(source.headers))
        if quantization is None and as_stored and not deterministic and not lossless:
            part = share_of(config, group.rank, group.size).part
            quantization = _made_for(source, part, device, dtype)
            bfloat16 = bfloat16 and quantization is None
    share = share_of(config, group.rank, group.size)
    halves = source.half_type if source is not None and dtype == torch.float32 else None
    if bfloat16:
        halves = torch.bfloat16
    linear = linear_class(
        quantization, device, dtype, halves=halves, deterministic=deterministic, bfloat16=bfloat16
    )
    if linear is Int4Linear and source is not None and source.four_bit:
        linear = WiderInt4Linear
    # A head of float32 weights needs a float32 embedding; others leave it in 16 bits.
    widened = linear is Linear or deterministic or linear.for_head() is Linear
    embedding_dtype = dtype if halves is None or widened else halves
    taken = weight_bytes(share.part, linear, dtype, device, embedding_dtype)
    remedy = smaller_weights(quantization, device)
    check_room("the weights", taken, device, remedy)
    if source is not None and source.stored is not None:
        _log_decoding(source, linear, dtype, taken, device)
    with explained("the weights", taken, device, remedy):
        decoder = Decoder(
            share.part,
            linear=linear,
            dtype=dtype,
            device=device,
            embedding_dtype=embedding_dtype,
            share=share,
            group=group,
        )
        if source is None:
            _fill_randomly(places_of(decoder), config, device, seed)
        else:
            _fill_from_files(decoder, path, source)
    return decoder


def _fill_from_files(decoder: Decoder, path: Path, source: TensorSource) -> None:
    """Copies the tensors of a checkpoint to a decoder."""
    config, places = decoder.share.whole, places_of(decoder)
    embedding, head = f"{config.names.embedding}.weight", f"{config.names.head}.weight"
    spare = {head} - set(places)
    spare |= _biases_of_zero(source, set(places))
    files = {header.file for header in source.headers.values()}
    where = files.pop() if len(files) == 1 else path
    _check_names(where, set(source.headers), set(places), spare)
    headers = {
        name: header
        for name, header in source.headers.items()
        if not name.endswith(_IGNORED_SUFFIXES)
    }
    _check_headers(headers, places)
    with LoadingProgress(sum(header.size for header in headers.values())) as progress:
        for name, header in in_order(headers, first=embedding, last=head):
            if name in places:
                place = places[name]
                place.fill(_read(source, name, place))
            elif name == head:
                _check_tied(where, _read(source, name, places[embedding]), decoder)
            progress.add(header.size)


def _read(source: TensorSource, name: str, place: Place) -> torch.Tensor | Grouped:
    """What a place takes of a tensor."""
    part = source.read_grouped(name) if place.takes_groups else None
    if part is not None:
        return part if place.cut is None else place.cut.of_grouped(part)
    return source.read(name) if place.cut is None else source.read_part(name, place.cut)


def _wanted(config: ModelConfig) -> list[str]:
    """The names of the tensors that a model of this config has."""
    meta = torch.device("meta")
    return list(places_of(Decoder(config, dtype=config.torch_dtype, device=meta)))


def _made_for(
    source: TensorSource, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> str | None:
    """The quantization that the checkpoint was made for, if the device has its products."""
    made_for = "int8" if source.eight_bit else "int4" if source.four_bit else None
    if made_for is None or device.type != "cpu":
        return None
    if made_for == "int4" and not (group_kernels() and _divides(config)):
        return None
    try:
        linear_class(made_for, device, dtype)
    except ValueError as error:
        logger.info("weights stay in 16 bits: %s", error)
        return None
    return made_for


def _divides(config: ModelConfig) -> bool:
    """Whether the inputs of all projections can be in groups."""
    widths = {config.hidden_size, config.num_heads * config.head_dim}
    for layer in config.layers:
        own = config.intermediate_size if layer.experts is None else layer.experts.inner
        widths.add(own)
    return all(width % BLOCK == 0 for width in widths)


def _log_decoding(
    source: TensorSource, linear: type[Linear], dtype: torch.dtype, taken: int, device: torch.device
) -> None:
    bits, kept = linear.stored_as(dtype)
    smaller = ""
    if bits > 8:
        smaller = f". If that is too much: {smaller_weights(None, device)}"
    logger.info(
        "weights stored as %s become %s, %s%s",
        source.stored,
        kept,
        readable(taken),
        smaller,
    )


def _check_headers(headers: Mapping[str, Header], places: Mapping[str, Place]) -> None:
    """Refuses tensors of other shapes or types than the decoder's, before any is read."""
    for name, header in headers.items():
        place = places.get(name)
        if place is None:
            continue
        if header.shape != place.shape:
            raise ValueError(
                f"{header.file}: tensor {name} has shape {header.shape}; "
                f"the config asks for {place.shape}"
            )
        if header.dtype not in place.dtypes:
            allowed = ", ".join(str(each).removeprefix("torch.") for each in place.dtypes)
            raise ValueError(
                f"{header.file}: tensor {name} is {header.dtype}; supported are {allowed}"
            )


def _biases_of_zero(source: TensorSource, wanted: set[str]) -> set[str]:
    """Biases that the model does not have, and that change nothing: AutoGPTQ writes such."""
    if source.stored is None:
        return set()
    more = [name for name in source.headers if name.endswith(".bias") and name not in wanted]
    return {name for name in more if not source.read(name).any()}


def _with_prefix(config: ModelConfig, found: set[str]) -> ModelConfig:
    """The config with the names of a checkpoint that was saved as a bare model."""
    names = config.names
    bare = {
        name: getattr(names, name).removeprefix("model.") for name in ("embedding", "norm", "layer")
    }
    if f"{names.embedding}.weight" in found or f"{bare['embedding']}.weight" not in found:
        return config
    return replace(config, names=replace(names, **bare))


def _check_names(path: Path, found: set[str], wanted: set[str], allowed: set[str]) -> None:
    """Refuses a checkpoint that lacks a tensor, or has one that is not ``allowed`` either."""
    unexpected = {n for n in found - wanted - allowed if not n.endswith(_IGNORED_SUFFIXES)}
    for kind, names in (("lacks", wanted - found), ("has unexpected", unexpected)):
        if names:
            shown = ", ".join(sorted(names)[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{path} {kind} tensors: {shown}{more}")


def _check_tied(path: Path, head: torch.Tensor | Grouped, decoder: Decoder) -> None:
    embedding = decoder.embedding
    assert embedding is not None and isinstance(head, torch.Tensor)
    names = decoder.config.names
    if not torch.equal(head.to(embedding), embedding):
        raise ValueError(
            f"{path}: tensor {names.head}.weight differs from {names.embedding}.weight, though the "
            "config has tie_word_embeddings: set that to false in config.json"
        )


def _fill_randomly(
    places: dict[str, Place], config: ModelConfig, device: torch.device, seed: int
) -> None:
    """Normal numbers of deviation 0.02 for matrices and biases, ones for norms."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, place in places.items():
        if name.endswith("norm.weight"):
            place.fill(torch.full(place.shape, 1.0 - config.norm_offset, device=device))
        else:
            # The whole tensor, so that all ranks of a model have parts of the same.
            tensor = torch.empty(math.prod(place.shape), device=device)
            tensor = tensor.normal_(std=0.02, generator=generator).view(place.shape)
            place.fill(tensor if place.cut is None else place.cut.of(tensor))
