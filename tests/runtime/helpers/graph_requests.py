"""Requests whose tokens graphs choose, and others; on a fake device and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams

COMMON: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
#: A graph chooses their tokens.
SAMPLED = [
    SamplingParams(temperature=0.9, seed=1, **COMMON),
    SamplingParams(temperature=0, logprobs=2, **COMMON),
    SamplingParams(temperature=1.3, top_k=3, seed=2, logprobs=0, **COMMON),
    SamplingParams(temperature=1.1, top_p=0.6, min_p=0.01, seed=3, **COMMON),
    SamplingParams(temperature=1.2, top_k=7, top_p=0.9, seed=4, **COMMON),
]
#: Where there is one of these, tokens are chosen outside.
OUTSIDE: dict[str, Any] = {
    "penalty": SamplingParams(temperature=0.9, presence_penalty=1.0, seed=5, **COMMON),
    "early end": SamplingParams(temperature=0, min_tokens=2, max_tokens=6),
    "bias": SamplingParams(temperature=0, logit_bias={3: 50.0}, **COMMON),
    "samples": SamplingParams(temperature=0.9, n=3, seed=6, **COMMON),
    "beams": BeamSearchParams(2, 5, ignore_eos=True),
}

Found = dict[tuple[str, int], tuple[list[int], list[list[int]]]]


def answered(
    engine: Engine, asked: Sequence[Any], check: Callable[[], object] = lambda: None
) -> Found:
    """Tokens, and ids with logprobs, of each sequence; a request begins in every second step."""
    found: Found = {}
    waiting = list(enumerate(asked))
    while waiting or engine.has_unfinished():
        if waiting:
            number, params = waiting.pop(0)
            prompt = [3 + number, *range(4, 9 + 2 * number)]
            if isinstance(params, BeamSearchParams):
                engine.add_beam_search(str(number), prompt, params)
            else:
                engine.add_request(str(number), prompt, params)
        for _ in range(2):
            for output in engine.step():
                assert output.error is None, output.error
                tokens, best = found.setdefault((output.request_id, output.index), ([], []))
                tokens += output.new_token_ids
                if output.logprobs is not None:
                    best += output.logprobs.top_ids.tolist()
            engine.check()
            check()
    return found
