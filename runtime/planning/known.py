"""What each family of models runs on, from the config that its registry entry makes by default."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.runtime.model.families.registry import FAMILIES
from coppice.runtime.model.files.formats import GGUF_FAMILIES


@dataclass(frozen=True, slots=True)
class KnownFamily:
    """A family of our own.

    Attributes:
        model_type, architecture: what a `config.json` calls it.
        one_call: whether a CPU computes all layers in one compiled call.
        int8, fp8: whether weights of 8 (and 4) bits can be had on a CPU, and of 8 on a GPU.
        gguf: whether its GGUF files are read.
        adapters: what LoRA adapters may change, "all" projections or those of "attention".
        experts, windows, soft_cap, sinks: what its layers have, in the configs that are published
            as its default.
        stored: methods of quantization that are read of this family alone.
    """

    model_type: str
    architecture: str
    one_call: bool
    int8: bool
    fp8: bool
    gguf: bool
    adapters: str
    experts: bool
    windows: bool
    soft_cap: bool
    sinks: bool
    stored: tuple[str, ...]


def known_families() -> tuple[KnownFamily, ...]:
    """All families, in the order of their registry. Imports no torch."""
    return tuple(_known(model_type) for model_type in FAMILIES)


def _known(model_type: str) -> KnownFamily:
    family = FAMILIES[model_type]
    config = family.read({"model_type": model_type}, eos_token_ids=())
    return KnownFamily(
        model_type=model_type,
        architecture=config.architecture,
        one_call=config.fits_one_call,
        int8=True,  # products of any linear layer, and of experts
        fp8=not config.has_experts,  # the kernels of a GPU compute experts in their type
        gguf=model_type in GGUF_FAMILIES,
        adapters="attention" if config.has_experts else "all",
        experts=config.has_experts,
        windows=any(window is not None for window in config.sliding_windows),
        soft_cap=config.attention_softcap is not None,
        sinks=any(layer.sinks for layer in config.layers),
        stored=family.stored_quantized,
    )
