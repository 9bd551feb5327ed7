"""Requests of every kind over one shared text, by which engines on two devices are compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.logprobs import Logprobs
from coppice.runtime.requests.request import StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams


def make_prompts(stem: int) -> list[list[int]]:
    """Four prompts that diverge from a text of `stem` tokens at several places; two are equal."""
    rng = random.Random(5)
    text = [rng.randrange(3, 250) for _ in range(stem)]
    own = [[rng.randrange(3, 250) for _ in range(length)] for length in (3, 7, 1)]
    return [text + own[0], text + own[1], text[: stem * 2 // 3] + own[2], text + own[0]]


def make_engine(path: Path, **options: Any) -> Engine:
    """A small engine whose prefills take several steps."""
    small = {"kv_cache_tokens": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    return Engine(EngineConfig(model=str(path), **(small | options)))


def run(engine: Engine) -> dict[tuple[str, int], list[StepOutput]]:
    """Outputs of each request and index; every page and lock is recounted after each step."""
    outputs: dict[tuple[str, int], list[StepOutput]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.check()
    assert make_report(engine).pages_held == 0
    return outputs


def greedy(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """The most probable continuation of each prompt; they run together."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    found = run(engine)
    return [joined(found[str(number), 0]) for number in range(len(prompts))]


def lines_and_bits(
    engine: Engine, prompts: Sequence[list[int]], tokens: int, **options: Any
) -> list[tuple[list[int], bytes]]:
    """Tokens and the logprobs' bytes of each line of each prompt; greedy by default."""
    params = {"temperature": 0.0, "logprobs": 2, "max_tokens": tokens, "ignore_eos": True}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, SamplingParams(**(params | options)))
    made = []
    for _, outputs in sorted(run(engine).items()):
        found = Logprobs.joined([each.logprobs for each in outputs if each.logprobs is not None])
        assert len(found) == tokens
        made.append((joined(outputs), found.logprobs.tobytes() + found.top_logprobs.tobytes()))
    return made


def joined(outputs: Sequence[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def answers(engine: Engine, *, stem: int, tokens: int) -> dict[str, Any]:
    """Tokens of greedy requests cold and warm, of three forks, of three beams with their scores."""
    prompts = make_prompts(stem)
    found: dict[str, Any] = {"cold": greedy(engine, prompts, tokens)}
    before = make_report(engine).hit_tokens
    found["warm"] = greedy(engine, prompts, tokens)
    # All but the last token of each prompt: its logits are needed.
    found["hits"] = make_report(engine).hit_tokens - before
    assert found["hits"] == sum(len(prompt) - 1 for prompt in prompts)
    forks = SamplingParams(
        n=3, temperature=1.0, top_p=0.95, seed=7, max_tokens=tokens, ignore_eos=True,
        presence_penalty=0.5,
    )  # fmt: skip
    plain = SamplingParams(n=2, temperature=0.8, seed=8, max_tokens=tokens, ignore_eos=True)
    engine.add_request("forks", prompts[1], forks)
    engine.add_request("plain", prompts[2], plain)
    engine.add_beam_search("beams", prompts[0], BeamSearchParams(3, tokens, ignore_eos=True))
    outputs = run(engine)
    beams = [outputs["beams", index][0] for index in range(3)]
    found["sampled"] = {key: joined(each) for key, each in outputs.items() if key[0] != "beams"}
    found["beams"] = [list(beam.new_token_ids) for beam in beams]
    found["scores"] = [beam.score for beam in beams]
    return found


def prompt_logprobs(engine: Engine, prompt: list[int]) -> np.ndarray:
    """Logprobs of a prompt's tokens but the first, by a request of its own, computed in chunks."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    engine.add_request("scored", prompt, params)
    (outputs,) = run(engine).values()
    scored = [each.prompt_logprobs for each in outputs if each.prompt_logprobs is not None]
    return scored[0].logprobs[1:]
