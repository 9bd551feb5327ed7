"""Greedy texts of engines that sum the same numbers in another order, and so round otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.logprobs import Logprobs
from coppice.runtime.requests.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class GreedyText:
    """What an engine answers to a prompt.

    Attributes:
        tokens: of the answer.
        logprobs: of every token of the vocabulary at each place of the answer, ``[place, token]``.
        of_prompt: of each token of the prompt but the first.
    """

    tokens: list[int]
    logprobs: np.ndarray
    of_prompt: np.ndarray


def greedy_texts(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[GreedyText]:
    """The answers to all prompts, which the engine computes together."""
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=-1, prompt_logprobs=0
    )
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    tokens: list[list[int]] = [[] for _ in prompts]
    places: list[list[Logprobs]] = [[] for _ in prompts]
    of_prompt: dict[int, np.ndarray] = {}
    while engine.has_unfinished():
        for step in engine.step():
            number = int(step.request_id)
            tokens[number].extend(step.new_token_ids)
            if step.logprobs is not None:
                places[number].append(step.logprobs)
            if step.prompt_logprobs is not None:
                of_prompt[number] = step.prompt_logprobs.logprobs[1:]
    return [
        GreedyText(own, _by_token(Logprobs.joined(found)), of_prompt[number])
        for number, (own, found) in enumerate(zip(tokens, places, strict=True))
    ]


def _by_token(logprobs: Logprobs) -> np.ndarray:
    """Those of all tokens in the order of their numbers, not of their probabilities."""
    found = np.empty_like(logprobs.top_logprobs)
    np.put_along_axis(found, logprobs.top_ids, logprobs.top_logprobs, axis=1)
    return found


def same_but_for_near_ties(
    texts: Sequence[GreedyText], others: Iterable[Sequence[int]], near: float
) -> int:
    """How many of the others' answers equal ``texts`` to their ends.

    Sums in another order move each logit a little, so the other engine may take another token only
    where that one is almost as probable: its log-probability lies within ``near`` of the best one's
    in ``texts``. After such a place the two continue different texts, which say nothing more of
    each other. Fails where answers part at any other place.

    Callers demand that enough answers are equal: else engines that part at once, at near-ties,
    would pass.
    """
    equal = 0
    for number, (text, other) in enumerate(zip(texts, others, strict=True)):
        assert len(other) == len(text.tokens), f"answer {number} has another length"
        parted = [place for place, token in enumerate(text.tokens) if other[place] != token]
        if not parted:
            equal += 1
            continue
        place = parted[0]
        logprobs = text.logprobs[place]
        gap = float(logprobs[text.tokens[place]] - logprobs[other[place]])
        assert gap <= near, (
            f"answer {number}, token {place}: {other[place]} is less probable than "
            f"{text.tokens[place]} by {gap:.3g}, which is no near-tie"
        )
    return equal
