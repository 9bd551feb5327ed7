"""The store of prompt logprobs against a dictionary of whole prefixes."""

from __future__ import annotations

import random
from array import array

import numpy as np

from coppice.radix import check
from coppice.runtime.requests.logprobs import Logprobs
from coppice.runtime.requests.request import Request
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.known_logprobs import KnownLogprobs


def known(capacity: int) -> tuple[KnownLogprobs, np.ndarray]:
    return KnownLogprobs(100, capacity=capacity), np.random.default_rng(0)


def test_the_store_gives_back_what_was_put_in_and_is_bounded() -> None:
    """Random prefixes that branch, against a dictionary of whole prefixes."""
    store, numbers = known(64)
    rng = random.Random(0)
    stored: dict[tuple[int, ...], float] = {}
    held = 0
    for _ in range(400):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
        packed = array("i", tokens).tobytes()
        entries = Logprobs.blank(len(tokens), store.top)
        length = store.read(packed, None, 1, entries)
        for place in range(1, length):
            assert entries.logprobs[place] == stored[tuple(tokens[: place + 1])]
            assert (entries.top_ids[place] == place).all()
        held += length > 1
        for place in range(length, len(tokens)):
            prefix = tuple(tokens[: place + 1])
            stored[prefix] = np.float32(numbers.random())
            entries.logprobs[place] = stored[prefix]
            entries.top_ids[place] = place
        if length < len(tokens):
            store.store(packed, None, entries)
        assert store.tree is not None
        assert store.tree.cached_tokens <= 64
        check(store.tree, [])
    assert held > 100
    assert store.tree.evicted_tokens > 0


def test_a_prompt_that_is_longer_than_the_store_is_not_kept() -> None:
    store, _ = known(8)
    params = SamplingParams(prompt_logprobs=1)
    request = Request("r", array("i", range(9)), params, None, 0, 0, 20)
    prompt = store.begin(request)
    assert prompt is not None
    prompt.extend(Logprobs.blank(8, store.top))
    prompt.keep()
    assert store.begin(request).limit(8) == 0
    assert prompt.limit(8) == 8
    assert store.tree is not None
    check(store.tree, [])
