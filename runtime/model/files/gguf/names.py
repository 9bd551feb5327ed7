"""Which tensors of a GGUF file make each tensor of a checkpoint, by transformers' tables."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class _Model:
    """What the table asks a model for: the names of its tensors."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def state_dict(self) -> dict[str, None]:
        return dict.fromkeys(self._names)

    def named_children(self) -> list[Any]:
        return []


def processor_of(architecture: str, config: Mapping[str, Any]) -> Any:
    """What undoes the changes that a converter to GGUF makes to tensors of an architecture."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=dict(config))


def sources_of(
    wanted: Collection[str], architecture: str, layers: int, processor: Any
) -> dict[str, tuple[str, int | None]]:
    """For each wanted name the GGUF tensor, and the expert of it where it holds all of them.

    Names that no GGUF tensor makes are left out.
    """
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    table = get_gguf_hf_weights_map(_Model(wanted), processor, architecture, layers)
    stored = {name: gguf_name for gguf_name, name in table.items()}
    found: dict[str, tuple[str, int | None]] = {}
    for name in wanted:
        whole = processor.preprocess_name(name)
        if whole in stored:
            expert = _EXPERT.search(name) if whole != name else None
            found[name] = stored[whole], int(expert[1]) if expert else None
    return found
