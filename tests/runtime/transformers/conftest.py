"""Tiny random checkpoints of families that are not our own, made with transformers.

Sizes and weights are those of `tests/runtime/conftest.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from tests.runtime.conftest import SHAPE

_HEAD: dict[str, Any] = {"head_dim": 16}
_WINDOW: dict[str, Any] = {
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention"],
}
_LATENT: dict[str, Any] = {  # keys of 24, values of 16
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_LENGTH: dict[str, Any] = {"n_positions": 512}

#: What each family's config has beside the shape. Those of our own are not among them.
FAMILIES: dict[str, dict[str, Any]] = {
    "starcoder2": {"sliding_window": 11},
    "gpt_bigcode": _LENGTH,  # the first StarCoder
    "gpt_neox": {},
    "gpt2": _LENGTH,
    "opt": {"ffn_dim": 128},
    "stablelm": {},
    "cohere": {"logit_scale": 0.5},
    "cohere2": _WINDOW,
    "nemotron": {},
    "exaone4": _WINDOW,
    "olmo": {"clip_qkv": 2.0},
    "phi": {},
    "persimmon": {},
    "gemma": _HEAD,
    "glm": _HEAD,
    "helium": _HEAD,
    "ernie4_5": _HEAD,
    "seed_oss": _HEAD,
    "hunyuan_v1_dense": _HEAD,
    "apertus": {},
    "bitnet": {},
    "arcee": {},
    "nanochat": {},
    "internlm3": _HEAD,
    "granite_swa": {},  # sinks
    "vaultgemma": _WINDOW | _HEAD | {"query_pre_attn_scalar": 24},  # soft-cap
    "minicpm3": _LATENT,
    "deepseek_v3": _LATENT | {"first_k_dense_replace": 2},
    "diffllama": {},  # two calls of attention a layer
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_intermediate_size": 32, "moe_k": 2},
}

#: Those that ask nothing of attention, loading or products that others do not.
ALIKE = {
    "opt", "persimmon", "gemma", "glm", "helium", "hunyuan_v1_dense", "arcee", "nanochat",
    "internlm3", "granitemoe", "ernie4_5_moe", "exaone4",
}  # fmt: skip


@pytest.fixture(scope="session")
def foreign_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``foreign_checkpoint(family, **changes)``: the folder of a checkpoint, made once a session.

    ``changes`` to the config; ``auto_class`` is the class that makes the model. Do not change the
    folder.
    """
    made: dict[str, Path] = {}

    def make(family: str, *, auto_class: Any = AutoModelForCausalLM, **changes: Any) -> Path:
        key = f"{family} {auto_class.__name__} {sorted(changes.items())}"
        if key not in made:
            config = AutoConfig.for_model(family, **(SHAPE | FAMILIES.get(family, {}) | changes))
            model = auto_class.from_config(config, attn_implementation="eager").eval()
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    norm = name.endswith("weight") and ("norm" in name or "ln_" in name)
                    parameter.normal_(1.0 if norm else 0.0, 0.3, generator=generator)
            made[key] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[key])
        return made[key]

    logging.disable_progress_bar()
    return make
