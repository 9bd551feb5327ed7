"""Log-probabilities of earlier requests' prompts, kept so that they are not computed again."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from coppice.radix import OutOfPages, PagePool, RadixTree
from coppice.radix.tokens import TOKEN_BYTES
from coppice.runtime.requests.logprobs import Logprobs
from coppice.runtime.requests.prompt_logprobs import PromptLogprobs
from coppice.runtime.requests.request import Request

# At most this many prompt tokens are kept, with this many alternatives each: 11 MB.
KNOWN_TOKENS = 65_536
KNOWN_TOP = 20


class KnownLogprobs:
    """Prompt logprobs of earlier requests, by prefix: a radix tree, whose pages index into arrays.

    Keeps at most `capacity` tokens with `KNOWN_TOP` alternatives each; the least recently used are
    evicted first, from the ends of prefixes. A longer prompt is not kept, and requests for more
    alternatives are not served from here.
    """

    def __init__(
        self, vocabulary: int, *, enabled: bool = True, capacity: int = KNOWN_TOKENS
    ) -> None:
        """Takes no memory before the first request for prompt logprobs, and none if not enabled."""
        self.top = min(KNOWN_TOP, vocabulary)
        self.tree: RadixTree | None = None
        self._vocabulary = vocabulary
        self._enabled = enabled
        self._capacity = capacity
        self._entries = Logprobs.blank(0, self.top)

    def begin(self, request: Request) -> PromptLogprobs | None:
        """The logprobs of a request's prompt, as far as they are known; None: not asked for."""
        top = request.params.prompt_logprobs
        if top is None:
            return None
        top = self._vocabulary if top < 0 else top
        store = self if self._enabled and top <= self.top else None
        start = request.params.prompt_logprobs_start
        tokens = request.keys(request.prompt_token_ids)
        return PromptLogprobs(tokens, request.namespace, top, store, start)

    def limit(self, request: Request) -> int:
        """The most tokens that a request could hit now; changes nothing, unlike `begin`."""
        last, params = len(request.prompt_token_ids) - 1, request.params
        if params.prompt_logprobs is None:
            return last
        known = max(1, params.prompt_logprobs_start)
        if self.tree is not None and self._enabled and 0 <= params.prompt_logprobs <= self.top:
            match = self.tree.match(request.keys(request.prompt_token_ids), request.namespace)
            known = max(known, match.length)
        return last if known > last else known - 1

    def read(self, tokens: bytes, namespace: Hashable, known: int, into: Logprobs) -> int:
        """Copies the known logprobs of `tokens` (int32 bytes) from position `known` on.

        Returns the number of tokens whose logprobs are known now. O(tokens).
        """
        tree = self.tree
        if tree is None or (match := tree.match(tokens, namespace)).length <= known:
            return known
        hold = tree.lock(match)
        places = np.array(tree.page_table(hold), np.int32)[known:]
        tree.unlock(hold)
        self._entries[places].copy_to(into, slice(known, match.length))
        return match.length

    def store(self, tokens: bytes, namespace: Hashable, entries: Logprobs, start: int = 0) -> None:
        """Keeps the logprobs of all `tokens`. O(tokens).

        The first `start` of `entries` are undefined: unless they are known already, nothing is
        kept.
        """
        if self.tree is None:
            self.tree = RadixTree(PagePool(self._capacity, 1))
            self._entries = Logprobs.blank(self._capacity, self.top)
        tree = self.tree
        match = tree.match(tokens, namespace)
        new = len(tokens) // TOKEN_BYTES - match.length
        if not new or match.length < start:
            return
        hold = tree.lock(match)
        table = tree.page_table(hold)
        try:
            places = tree.allocate(new)
        except OutOfPages:
            tree.unlock(hold)
            return
        entries[match.length :].copy_to(self._entries, np.array(places, np.int32))
        table += places
        tree.insert(hold, tokens, table)
        tree.release(hold, table)

    def clear(self) -> None:
        """Forgets everything."""
        self.tree = None
        self._entries = Logprobs.blank(0, self.top)
