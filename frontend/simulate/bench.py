"""Measures a model on this machine: how long prompts and decoding steps take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from coppice.runtime.engine.core import Engine
from coppice.runtime.offline.machine import Machine
from coppice.runtime.requests.sampling_params import SamplingParams

_WARM_UP = 2  # rounds that are not counted: they compile, and fill caches


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians, in seconds.

    Attributes:
        prefill: of a step that computes `prompt_tokens` tokens of one prompt.
        decode: of steps in which only that many sequences decode, by that number.
        machine: the model of a machine that has these times.
    """

    prompt_tokens: int
    prefill: float
    decode: dict[int, float]
    machine: Machine


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most` itself."""
    sizes = [1]
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return sizes if sizes[-1] == most else [*sizes, most]


def measure(
    engine: Engine,
    *,
    prompt_tokens: int,
    context_tokens: int,
    max_batch: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[str | Measured]:
    """Times steps of an engine that has nothing else to do; yields what it does, then the result.

    All prompts are random, so nothing hits.

    Args:
        engine: the model.
        prompt_tokens: of the prompt that is timed; it must fit one step.
        context_tokens: of each sequence, when decoding is timed.
        max_batch: most sequences that decode at once.
        rounds: how many times are taken of each; their median counts.
        clock: seconds.

    Raises ValueError if an argument does not suit the engine.
    """
    config = engine.config
    limit = min(config.most_tokens, engine.max_model_len - 1)
    if not 2 <= prompt_tokens <= limit:
        raise ValueError(
            f"prompt-tokens must be from 2 to {limit}, the most of one step, got {prompt_tokens}"
        )
    if not 1 <= max_batch <= config.most_seqs:
        raise ValueError(
            f"max-batch must be from 1 to max-num-seqs ({config.most_seqs}), got {max_batch}"
        )
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    # The prompts of a batch take several steps, in which sequences that are ahead decode.
    ahead = -(-max_batch * context_tokens // config.most_tokens) + 1
    decoded = _WARM_UP + rounds + ahead + 1
    length = context_tokens + decoded
    if context_tokens < 1 or length > engine.max_model_len:
        raise ValueError(
            f"context-tokens must be from 1 to {engine.max_model_len - decoded}, which the model "
            f"takes beside {decoded} measured tokens, got {context_tokens}"
        )
    # A page more for each sequence, since they may grow before an ended one has left.
    pages = max_batch * (-(-length // config.page_size) + 1)
    if pages > engine.num_pages:
        raise ValueError(
            f"max-batch: {max_batch} sequences of {length} tokens need {pages} pages of KV cache, "
            f"and there are {engine.num_pages}; give a smaller --max-batch or --context-tokens"
        )
    rng = np.random.default_rng(0)
    vocabulary = engine.model_config.vocab_size
    numbers = iter(range(1 << 30))

    def add(tokens: int, output: int) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        prompt = rng.integers(0, vocabulary, tokens).tolist()
        name = f"bench-{next(numbers)}"
        engine.add_request(name, prompt, params)
        return name

    def timed() -> float:
        begun = clock()
        engine.step()
        return clock() - begun

    yield f"a prompt of {prompt_tokens:,} tokens"
    times = []
    for _ in range(_WARM_UP + rounds):
        add(prompt_tokens, 1)
        begun = clock()
        while engine.has_unfinished():
            engine.step()
        times.append(clock() - begun)
    prefill = statistics.median(times[_WARM_UP:])
    decode: dict[int, float] = {}
    for size in batch_sizes(max_batch):
        yield f"{size} decoding sequence{'s' * (size > 1)}"
        prompts = {add(context_tokens, decoded) for _ in range(size)}
        while prompts:
            prompts -= {out.request_id for out in engine.step() if out.new_token_ids}
        times = []
        while engine.num_unfinished == size and len(times) < _WARM_UP + rounds:
            times.append(timed())
        decode[size] = statistics.median(times[_WARM_UP:])
        while engine.has_unfinished():
            engine.step()
    yield Measured(prompt_tokens, prefill, decode, fitted(prompt_tokens, prefill, decode))


def fitted(prompt_tokens: int, prefill: float, decode: dict[int, float]) -> Machine:
    """The machine with these times: a step without sequences takes as long as one with one.

    A decoding step that took longer than one with more sequences was disturbed, and counts as long
    as that.
    """
    points = [
        (size, min(decode[more] for more in decode if more >= size)) for size in sorted(decode)
    ]
    step = min(points[0][1], prefill / 2)
    return Machine(step, (prefill - step) / prompt_tokens, tuple(points))
