"""Frequencies and rotation against those of transformers' Llama."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from coppice.kernels.attention.interface import rotate
from coppice.runtime.model.config import RopeConfig
from coppice.runtime.model.reading.rotation import rope_parameters
from coppice.runtime.model.rope import RotaryEmbedding, attention_factor, frequencies

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn with options": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn with a factor of its own": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
    },
}


def llama(**rope: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters=rope,
    )


def read(**rope: Any) -> RopeConfig:
    return made({"rope_parameters": rope}, 256, 16)


def made(raw: dict[str, Any], positions: int, head_dim: int) -> RopeConfig:
    parameters = rope_parameters(raw, positions)
    return RopeConfig(parameters["rope_type"], head_dim, parameters)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotates_as_transformers_does(variant: str, dtype: torch.dtype) -> None:
    hf = llama(**VARIANTS[variant])
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, 100_000, (9,), generator=generator)
    heads = torch.randn(9, 6, 16, generator=generator).to(dtype)

    cos, sin = LlamaRotaryEmbedding(hf)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    rope = RotaryEmbedding(read(**VARIANTS[variant]), dtype=dtype, device=torch.device("cpu"))
    rotated = rotate(heads, *rope.angles(positions))

    assert rotated.dtype == dtype
    assert rotated.is_contiguous()
    # In bfloat16 the two orders of adding round differently, by one unit in the last place.
    tolerance = 1e-6 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(rotated, expected[0], atol=tolerance, rtol=0)


def test_rotation_leaves_its_input_alone_and_takes_views() -> None:
    heads = torch.randn(3, 5, 8)
    kept = heads.clone()
    rope = RotaryEmbedding(
        RopeConfig("default", 8, {"rope_theta": 1e4}),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    angles = rope.angles(torch.tensor([0, 5, 2]))
    part = rotate(heads[:, 1:4], *angles)
    assert torch.equal(heads, kept)
    assert torch.equal(part, rotate(heads, *angles)[:, 1:4])
    assert torch.equal(part[0], heads[0, 1:4])  # position 0 turns nothing


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "default"])
def test_frequencies_are_transformers_to_the_bit(variant: str) -> None:
    """On real sizes, where parts of a head are kept, stretched and between."""
    changes = {"original_max_position_embeddings": 8192}
    rope = {k: changes.get(k, v) for k, v in VARIANTS[variant].items()} | {"rope_theta": 5e5}
    hf = LlamaConfig(max_position_embeddings=131072, head_dim=128, rope_parameters=dict(rope))
    theirs, factor = ROPE_INIT_FUNCTIONS[variant.split()[0]](hf)
    ours = made({"rope_parameters": rope}, 131072, 128)
    assert frequencies(ours) == tuple(theirs.tolist())
    assert attention_factor(ours) == factor


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "dynamic"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5}, "factor"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": True}, "factor"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial"),
        ({"rope_type": "default", "rope_theta": "1e4"}, "rope_theta"),
        (VARIANTS["llama3"] | {"low_freq_factor": None}, "low_freq_factor of rope_type 'llama3'"),
        (VARIANTS["llama3"] | {"high_freq_factor": 1.0}, "high_freq_factor .* more than"),
        (VARIANTS["yarn"] | {"original_max_position_embeddings": 0}, "original_max_position"),
        (VARIANTS["yarn"] | {"beta_fast": "32"}, "beta_fast"),
        ({"full_attention": {"rope_type": "default", "rope_theta": 1e4}}, "differ by layer"),
    ],
)
def test_refuses_by_name(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read(**rope)
