"""Writes GGUF files of tiny checkpoints, as llama.cpp's converter lays them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel


def write_gguf(
    model: PreTrainedModel, target: Path, kind: str, *, tokens: bool = False, **metadata: Any
) -> dict[str, torch.Tensor]:
    """Writes the model with matrices stored as `kind`; its tensors, as the file's numbers are."""
    config, architecture = model.config, str(model.config.model_type)
    architecture = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}.get(
        architecture, architecture
    )
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_vocab_size(config.vocab_size)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    for name, value in metadata.items():
        writer.add_key_value(
            name.replace("__", "."),
            value,
            gguf.GGUFValueType.get_type(value),
        )
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if tokens:
        _add_tokens(writer, config.vocab_size)
    made = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            made[name] = _add_experts(writer, name, parameter.float().numpy(), kind)
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        values = parameter.float().numpy()
        if values.ndim == 1:
            offset = 1 if architecture.startswith("gemma") and "norm" in name else 0
            made[name] = parameter.float()
            writer.add_tensor(
                stored, _laid(values + np.float32(offset), name, config, architecture)
            )
            continue
        # Random blocks in the embedding or the head would make one token the likeliest of all.
        outer = kind in _SCALES and not name.startswith("model.layers")
        sort = gguf.GGMLQuantizationType["F16" if outer else kind]
        blocks = _blocks(values, sort)
        rounded = gguf.quants.dequantize(blocks, sort)
        writer.add_tensor(stored, _laid(blocks, name, config, architecture), raw_dtype=sort)
        made[name] = torch.from_numpy(rounded.reshape(values.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def _add_experts(writer: Any, name: str, values: Any, kind: str) -> torch.Tensor:
    """Adds one projection of all experts, or two that transformers keeps as one."""
    sort, layer = gguf.GGMLQuantizationType[kind], name.split(".")[2]
    parts = {"down": values}
    if "gate_up" in name:
        parts = dict(zip(("gate", "up"), np.split(values, 2, axis=1), strict=True))
    rounded = []
    for part, numbers in parts.items():
        blocks = gguf.quants.quantize(np.ascontiguousarray(numbers), sort)
        writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", blocks, raw_dtype=sort)
        rounded.append(gguf.quants.dequantize(blocks, sort).reshape(numbers.shape))
    return torch.from_numpy(np.concatenate(rounded, axis=1))


def _blocks(values: Any, sort: Any) -> Any:
    """The numbers as blocks of this type; as random ones where gguf only reads the type."""
    if sort.name not in _SCALES:
        return gguf.quants.quantize(values, sort)
    numbers, size = gguf.GGML_QUANT_SIZES[sort]
    rows, columns = values.shape
    blocks = np.random.default_rng(rows + 7).integers(
        0, 256, (rows, columns // numbers, size), "u1"
    )

    def decoded(*scales: float) -> Any:
        for place, scale in zip(_SCALES[sort.name], scales, strict=False):
            blocks[..., place : place + 2] = np.array([scale], np.float16).view(np.uint8)
        return gguf.quants.dequantize(blocks.reshape(rows, -1), sort)

    # Numbers are proportional to the scales; the second one's part makes their mean nought.
    second = -decoded(1, 0).mean() / decoded(0, 1).mean() if len(_SCALES[sort.name]) > 1 else 0.0
    first = values.std() / decoded(1, second).std()
    decoded(first, first * second)
    return blocks.reshape(rows, -1)


# Where the blocks of a type have their 16-bit scales.
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def _laid(values: Any, name: str, config: Any, architecture: str) -> Any:
    """Rows of queries and keys in the order in which neighbours are rotated together."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if architecture != "llama" or part not in heads:
        return values
    halves = values.reshape(heads[part], 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _add_tokens(writer: Any, count: int) -> None:
    """A vocabulary of bytes, and a chat template."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [256 + i for i in range(256 - len(letters))]
    tokens = ["<unk>", "<s>", "</s>", *(chr(each) for each in letters + rest)]
    kinds = [3, 3, 3] + [1] * 256
    tokens.append(chr(letters[0]) + chr(letters[1]))
    kinds.append(1)
    tokens += [f"<more{i}>" for i in range(count - len(tokens))]
    kinds += [4] * (count - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{chr(letters[0])} {chr(letters[1])}"])
    writer.add_bos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
