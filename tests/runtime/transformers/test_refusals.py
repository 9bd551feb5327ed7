"""What of transformers' models cannot run on pages is refused by name, with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.startup import room
from coppice.runtime.startup.room import TooLittleMemory
from coppice.runtime.transformers.describe import Described, describe
from tests.runtime.conftest import SHAPE

Make = Callable[..., Path]


def described(folder: Path, family: str, **changes: Any) -> Described:
    """A config of this family with the tests' sizes and ``changes``, described."""
    raw = AutoConfig.for_model(family, **SHAPE).to_dict() | changes
    (folder / "config.json").write_text(json.dumps(raw))
    return describe(folder, raw, ())


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mamba", {}, "it has layers of kind linear_attention"),
        ("falcon_h1", {}, "it has layers of kind hybrid"),
        ("recurrent_gemma", {}, "it has layers of kind linear_attention"),
        ("qwen3_next", {}, "it has layers of kind linear_attention"),
        ("bamba", {}, "it has layers of kind linear_attention"),
        ("jamba", {}, "it has layers of kind linear_attention"),
        ("rwkv", {}, "it has layers with a state of their own"),
        ("llama4_text", {}, "it has layers of kind chunked_attention"),
        (
            "llama4_text",
            {"layer_types": ["full_attention"] * 2, "attn_temperature_tuning": True},
            r"counts positions from the start of a step \(attn_temperature_tuning",
        ),
        ("deepseek_v32", {}, "it has layers of kind indexed_attention"),
        ("falcon", {}, "its attention is its own: it does not call"),
        ("gptj", {}, "its attention is its own: it does not call"),
        ("xglm", {}, "0 calls of attention went through .* in a pass of 2 layers"),
        ("bloom", {}, "it takes no position_ids"),
        ("mpt", {}, "it takes no position_ids"),
        ("doge", {}, "DogeAttention adds numbers of its own to its mask, such as ALiBi's"),
        ("bert", {}, "BertSelfAttention has a mask that lets tokens attend to later ones"),
        ("bart", {}, "it has an encoder"),
        ("gemma3", {}, r"it reads pictures or sound \(vision_config in config.json\)"),
        ("fuyu", {}, "it is no model for text alone"),
        ("llama", {"is_causal": False}, "has a mask that lets tokens attend to later ones"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            r"its rotation depends on the length of the sequence \(rope_type 'dynamic'\)",
        ),
        ("phi", {"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
        ("phi", {"architectures": ["PhiForTokenClassification"]}, "architectures is"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    tmp_path: Path, family: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"cannot run through transformers: .*{reason}"):
        described(tmp_path, family, **changes)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"model_type": "no_such"}, "no_such cannot run .* its config.json is not read"),
        (
            {"model_type": "other", "auto_map": {"AutoConfig": "x.Y"}},
            "needs code from its checkpoint",
        ),
    ],
)
def test_a_model_that_transformers_does_not_have_is_refused(
    tmp_path: Path, raw: dict[str, Any], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=reason):
        Engine(EngineConfig(model=str(tmp_path)))


def test_model_impl_coppice_names_the_families_that_there_are(foreign_checkpoint: Make) -> None:
    with pytest.raises(ValueError, match=r"PhiForCausalLM.*supported are LlamaForCausalLM"):
        Engine(EngineConfig(model=str(foreign_checkpoint("phi")), model_impl="coppice"))
    with pytest.raises(ValueError, match="model_impl must be one of auto, coppice, transformers"):
        EngineConfig(model="x", model_impl="vllm")
    with pytest.raises(ValueError, match="deterministic is True; with transformers' model"):
        Engine(EngineConfig(model=str(foreign_checkpoint("phi")), deterministic=True))
    with pytest.raises(ValueError, match="enable_lora is True; with transformers' model"):
        Engine(EngineConfig(model=str(foreign_checkpoint("phi")), enable_lora=True))


def test_what_layers_ask_of_attention_is_known_from_the_config(tmp_path: Path) -> None:
    found = described(
        tmp_path, "exaone4", sliding_window=11, layer_types=["sliding_attention", "full_attention"]
    )
    assert found.model.sliding_windows == (11, None)
    assert (found.model.num_heads, found.model.num_kv_heads, found.model.head_dim) == (4, 2, 16)
    assert (found.model.hidden_size, found.model.vocab_size) == (64, 320)
    assert found.model.max_position == 512
    wide = described(
        tmp_path, "minicpm3", qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        q_lora_rank=24, kv_lora_rank=16, num_key_value_heads=4, head_dim=8,
    )  # fmt: skip
    assert [(each.key_dim, each.value_dim) for each in wide.layers] == [(24, 16)] * 2
    assert wide.model.head_dim == 24
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}  # fmt: skip
    assert described(tmp_path, "llama", rope_parameters=long).model.max_position == 64


def test_a_model_that_mixes_tokens_beside_attention_is_refused(
    foreign_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = GPTNeoXMLP.forward
    monkeypatch.setattr(
        GPTNeoXMLP, "forward", lambda self, x: forward(self, x) + x.roll(1, dims=1).cumsum(1)
    )
    with pytest.raises(ValueError, match=r"GPTNeoXForCausalLM .* affect each other not by atten"):
        Engine(EngineConfig(model=str(foreign_checkpoint("gpt_neox")), kv_cache_tokens=64))


def broken(path: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> str:
    """The error of a copy of a checkpoint whose tensors were changed."""
    for file in path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="PhiForCausalLM") as error:
        Engine(EngineConfig(model=str(folder), kv_cache_tokens=64))
    return str(error.value)


def test_a_broken_checkpoint_is_refused_by_name(foreign_checkpoint: Make, tmp_path: Path) -> None:
    path, name = foreign_checkpoint("phi"), "model.layers.1.mlp.fc1.weight"
    message = broken(path, tmp_path, lambda tensors: tensors.pop(name))
    assert f"lacks tensors for PhiForCausalLM: {name}" in message
    message = broken(path, tmp_path, lambda tensors: tensors.update({name: torch.ones(3, 3)}))
    assert str(tmp_path) in message
    (tmp_path / "model.safetensors").write_bytes(b"0" * 64)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        Engine(EngineConfig(model=str(tmp_path)))


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    foreign_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "room", lambda device: 1000)
    with pytest.raises(TooLittleMemory, match=r"the weights take .* missing. Take a smaller model"):
        Engine(EngineConfig(model=str(foreign_checkpoint("phi"))))
