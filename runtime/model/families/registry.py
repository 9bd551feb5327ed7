"""The families that are supported: a new one has a file of its own and its name here."""

from __future__ import annotations

from coppice.runtime.model.families.family import Family
from coppice.runtime.model.families.llama import Llama
from coppice.runtime.model.families.mistral import Mistral
from coppice.runtime.model.families.qwen2 import Qwen2
from coppice.runtime.model.families.qwen3 import Qwen3

#: Each family by the ``model_type`` of its `config.json`.
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (Llama(), Mistral(), Qwen2(), Qwen3())
}
