"""Adapters of low rank in PEFT's files, with random matrices, and what they compute by definition.

The definition: a projection W becomes W + scale * B A; an adapter that tokens invoke adds
scale * B A x to the rows from their last occurrence on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

#: Names of projections of attention and feed-forward part, as most families call them.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "gate_up_proj", "down_proj")

#: Fields that PEFT 0.21 writes into every config, though they are not set.
UNSET: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None,
    "auto_mapping": None, "corda_config": None, "ensure_weight_tying": False, "eva_config": None,
    "exclude_modules": None, "fan_in_fan_out": False, "init_lora_weights": True,
    "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_bias": False, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_version": "0.21.2",
    "qalora_group_size": 16, "rank_pattern": {}, "revision": None, "target_parameters": None,
    "trainable_token_indices": None, "use_bdlora": None, "use_dora": False, "use_qalora": False,
    "use_rslora": False, "velora_config": None,
}  # fmt: skip


def load(checkpoint: Path) -> PreTrainedModel:
    """transformers' model in float32."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    return model.float().eval()


def save_adapter(
    folder: Path,
    model: PreTrainedModel,
    *,
    seed: int = 0,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    alpha: float = 6.0,
    ranks: dict[str, int] | None = None,
    file: str = "adapter_model.safetensors",
    **config: Any,
) -> Path:
    """Writes an adapter of the model's linear modules whose names end in ``targets``.

    ``ranks`` has the rank of modules by the ends of their names; ``config`` is more of its config.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not name.endswith(tuple(targets)):
            continue
        own = next((r for end, r in (ranks or {}).items() if name.endswith(end)), rank)
        for side, shape in (("A", (own, module.in_features)), ("B", (module.out_features, own))):
            tensor = torch.empty(shape).normal_(0, 0.3, generator=generator)
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file, metadata={"format": "pt"})
    found = {name.split(".")[-4] for name in tensors if ".lora_A" in name} | {
        name.split(".")[-3] for name in tensors if ".lora_A" in name
    }
    settings = UNSET | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": sorted(found & set(targets)),
        "inference_mode": True,
    }
    if ranks:
        settings["rank_pattern"] = ranks
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def read_changes(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """A, B and the scale of each module, by its name in transformers' model."""
    config = json.loads((folder / "adapter_config.json").read_text())
    binary = folder / "adapter_model.bin"
    tensors = torch.load(binary) if binary.exists() else load_file(
        folder / "adapter_model.safetensors"
    )  # fmt: skip
    found = {}
    for name, down in tensors.items():
        if ".lora_A" not in name:
            continue
        module = name.removeprefix("base_model.model.").split(".lora_A")[0]
        alphas = config.get("alpha_pattern", {})
        alpha = next((a for end, a in alphas.items() if module.endswith(end)), config["lora_alpha"])
        root = len(down) ** 0.5 if config.get("use_rslora") else len(down)
        found[module] = down, tensors[name.replace("lora_A", "lora_B")], alpha / root
    return found


def merged(checkpoint: Path, folder: Path) -> PreTrainedModel:
    """transformers' model with W + scale * B A in place of W."""
    model = load(checkpoint)
    with torch.no_grad():
        for name, (down, up, scale) in read_changes(folder).items():
            model.get_submodule(name).weight += scale * (up @ down)
    return model


def invoked(checkpoint: Path, folder: Path, begin: int) -> PreTrainedModel:
    """transformers' model with the adapter on the rows from ``begin`` on, for whole sequences."""
    model = load(checkpoint)
    for name, (down, up, scale) in read_changes(folder).items():

        def change(module, args, y, down=down, up=up, scale=scale):
            y[:, begin:] += scale * (args[0][:, begin:] @ down.t() @ up.t())
            return y

        model.get_submodule(name).register_forward_hook(change)
    return model


def greedy_by(model: PreTrainedModel, prompt: Sequence[int], tokens: int) -> list[int]:
    """The most probable tokens, each from all of the sequence before it."""
    ids = list(prompt)
    for _ in range(tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]
