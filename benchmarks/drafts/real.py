"""Prompts for a real model, and its answers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from coppice import Engine, EngineConfig, SamplingParams
from drafts.encoded import Text
from drafts.texts import WORKLOADS

_LONGEST = 1536  # tokens of a prompt; longer ones lose their beginning


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of token ids, and of how many tokens the model's answer is."""

    prompt: list[int]
    out: int


def asked_of(workload: str, count: int, checkpoint: Path, most: int) -> list[Asked]:
    """The first `count` prompts of a workload, with the lengths of the greedy answers to them."""
    texts = answered(workload, count, checkpoint, most)
    return [Asked(text.prompt.tolist(), len(text.answer)) for text in texts]


def answered(workload: str, count: int, checkpoint: Path, most: int) -> list[Text]:
    """The first `count` prompts of a workload, with the greedy answers to them, of at most `most`
    tokens."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    engine = Engine(EngineConfig(model=str(checkpoint), kv_cache_tokens=32_768, max_num_seqs=8))
    texts = []
    for number, turn in enumerate(WORKLOADS[workload](count)):
        ids = tokenizer.encode(turn.prompt, add_special_tokens=False)[-_LONGEST:]
        said = [{"role": "user", "content": tokenizer.decode(ids)}]
        prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
        texts.append(Text(array("i", prompt), array("i")))
        params = SamplingParams(temperature=0.0, max_tokens=most)
        engine.add_request(str(number), list(prompt), params)
    while engine.has_unfinished():
        for output in engine.step():
            texts[int(output.request_id)].answer.extend(output.new_token_ids)
    engine.close()
    return texts
