"""A real model for `speculation_peers.py`: its checkpoint, prompts and answers' lengths."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from coppice import Engine, EngineConfig, SamplingParams
from drafts.texts import WORKLOADS

_LONGEST = 1536  # tokens of a prompt; longer ones lose their beginning


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of token ids, and of how many tokens the model's answer is."""

    prompt: list[int]
    out: int


def real_checkpoint(file: Path, cache: Path) -> Path:
    """The folder of a GGUF file's model in float32, below `cache`; written if it is not there."""
    folder = cache / f"model-real-{file.stem}"
    if not folder.exists():
        partial = cache / f"{folder.name}.{os.getpid()}"
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # from_pretrained would do the same, and ask for the package accelerate.
        read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
        model.load_state_dict(read["tensors"], strict=False)
        model.tie_weights()
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
        partial.rename(folder)
    return folder


def asked_of(workload: str, count: int, checkpoint: Path, most: int) -> list[Asked]:
    """The first `count` prompts of a workload, with the lengths of the greedy answers to them."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    engine = Engine(EngineConfig(model=str(checkpoint), kv_cache_tokens=32_768, max_num_seqs=8))
    prompts = []
    for turn in WORKLOADS[workload](count):
        ids = tokenizer.encode(turn.prompt, add_special_tokens=False)[-_LONGEST:]
        said = [{"role": "user", "content": tokenizer.decode(ids)}]
        prompts.append(
            list(tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"])
        )
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=most)
        engine.add_request(str(number), prompt, params)
    lengths = dict.fromkeys(map(str, range(count)), 0)
    while engine.has_unfinished():
        for output in engine.step():
            lengths[output.request_id] += len(output.new_token_ids)
    engine.close()
    return [Asked(prompt, lengths[str(number)]) for number, prompt in enumerate(prompts)]
