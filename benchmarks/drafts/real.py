"""Prompts for a real model in `speculation_peers.py`, and its answers' lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from coppice import Engine, EngineConfig, SamplingParams
from drafts.texts import WORKLOADS

_LONGEST = 1536  # tokens of a prompt; longer ones lose their beginning


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of token ids, and of how many tokens the model's answer is."""

    prompt: list[int]
    out: int


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
