"""transformers' continuous batching with paged attention, on the weights of our decoder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from coppice.runtime.model.decoder import Decoder
from gpu_suite.bench import Ran

_PAGE = 32  # 256 by default. There only whole pages hit, and our workloads share 32 tokens or more


def run_transformers(
    path: Path, decoder: Decoder, prompts: Sequence[list[int]], out: int, deadline: float
) -> Ran:
    """Answers all prompts at once, until the deadline; making the manager does not count."""
    from transformers import ContinuousBatchingConfig

    model = same_model(path, decoder)
    known = {each.name for each in fields(ContinuousBatchingConfig)}
    # The name depends on the version.
    options: dict[str, Any] = {"page_size" if "page_size" in known else "block_size": _PAGE}
    tokens = sum(len(prompt) + out for prompt in prompts)
    if decoder.embedding.device.type == "cpu":  # what it derives from a GPU's memory
        options |= {"num_blocks": tokens // _PAGE + 64, "max_batch_tokens": 256}
        options |= {"use_async_batching": False, "use_cuda_graph": False}
    generation = GenerationConfig(
        max_new_tokens=out, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    manager = model.init_continuous_batching(generation, ContinuousBatchingConfig(**options))
    manager.start()
    lines: dict[str, list[int]] = {}
    finished: set[str] = set()
    try:
        # One short request first, so that compilation and capture do not count either.
        manager.add_request(prompts[0][:8], request_id="warm", max_new_tokens=2)
        while _result(manager) is None:
            if time.perf_counter() > deadline:
                raise TimeoutError("its first request did not end in time")
        start = time.perf_counter()
        for number, prompt in enumerate(prompts):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=out, streaming=True)
        while len(finished) < len(prompts) and time.perf_counter() < deadline:
            result = _result(manager)
            if result is not None:
                lines[result.request_id] = list(result.generated_tokens)
                if result.is_finished():
                    finished.add(result.request_id)
        seconds = time.perf_counter() - start
    finally:
        manager.stop(block=True, timeout=5)
        if manager.is_running():
            # Its thread still runs requests, so nothing else can be measured in this process.
            _EXIT_AFTER.append(True)
    made = sum(map(len, lines.values()))
    return Ran(seconds, made, len(finished) < len(prompts), lines)


_EXIT_AFTER: list[bool] = []


def must_exit() -> bool:
    """Whether a thread is left that only ends with the process."""
    return bool(_EXIT_AFTER)


def _result(manager: Any) -> Any:
    result = manager.get_result(timeout=0.2)
    if result is None and not manager.is_running():
        raise RuntimeError("transformers' generation thread ended")
    if result is not None and result.error is not None:
        raise RuntimeError(f"transformers: {result.error}")
    return result


def same_model(path: Path, decoder: Decoder) -> Any:
    """transformers' model of the config in `path`, on views of the decoder's weights."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # else it looks for kernels to download
    config = AutoConfig.from_pretrained(path)
    device = decoder.embedding.device
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    # Buffers that are computed from the config have no values on the device `meta`.
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    model.load_state_dict(_views(decoder), strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, each in model.named_parameters() if each.is_meta]
    if missing:
        raise RuntimeError(f"transformers' model has weights that ours lacks: {missing[:5]}")
    return model.eval()


def _views(decoder: Decoder) -> dict[str, torch.Tensor]:
    config = decoder.config
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    views = {
        "model.embed_tokens.weight": decoder.embedding,
        "model.norm.weight": decoder.norm.weight,
    }
    if not config.tie_word_embeddings:
        views["lm_head.weight"] = decoder.head.weight
    for index, layer in enumerate(decoder.layers):
        q, k, v = layer.qkv.weight.split([queries, keys, keys])
        gate, up = layer.gate_up.weight.chunk(2)
        own = {
            "input_layernorm": layer.attention_norm.weight,
            "post_attention_layernorm": layer.mlp_norm.weight,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.output.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight,
        }
        if layer.qk_norm is not None:
            own["self_attn.q_norm"] = layer.qk_norm.weight[0]
            own["self_attn.k_norm"] = layer.qk_norm.weight[config.num_heads]
        views |= {f"model.layers.{index}.{name}.weight": each for name, each in own.items()}
    return views
