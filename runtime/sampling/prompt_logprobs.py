"""Logprobs of prompts: which rows of a step they need, and what is known from earlier requests.

A prompt token's logprobs come from the row of the token before it. Of a prompt's hit nothing is
computed, so its rows are missing; a request for prompt logprobs therefore hits only as far as they
are known already (`PromptLogprobs.limit`), and computes from there:

    tokens     t0  t1  t2  t3  t4  t5  t6        logprobs of t0 .. t3 are known:
    known       *   *   *   *                    the rows of t0, t1, t2 are not needed,
    hit        [-----------]                     a hit may have up to three tokens,
    rows needed             t3  t4  t5           these give the logprobs of t4, t5, t6
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from coppice.radix import OutOfPages, PagePool, RadixTree
from coppice.radix.tokens import TOKEN_BYTES
from coppice.runtime.requests.logprobs import Logprobs
from coppice.runtime.requests.request import Request
from coppice.runtime.sampling.logprob_rows import log_probabilities, of_tokens

# Logits are made of so many rows at a time: of 4,096 rows and 150,000 tokens they are 2.4 GB.
SLICE_ROWS = 256

# Of so many prompt tokens logprobs are remembered, with so many alternatives: 11 MB at most.
KNOWN_TOKENS = 65_536
KNOWN_TOP = 20


class KnownLogprobs:
    """Prompt logprobs of earlier requests, by prefix: a radix tree whose pages are places in it.

    Keeps `KNOWN_TOP` alternatives a token, of at most `capacity` tokens; the least recently used go
    first, from the ends of prefixes. A prompt of more tokens is not kept, nor are requests served
    from here that ask for more alternatives.
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
        return PromptLogprobs(request.prompt_token_ids, request.namespace, top, store, start)

    def read(self, tokens: bytes, namespace: Hashable, known: int, into: Logprobs) -> int:
        """Copies what is known of `tokens` (int32 bytes) from place `known` on.

        Returns for how many tokens it is known now. O(tokens).
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
        """Enters those of all `tokens`. O(tokens).

        The first `start` ones of `entries` mean nothing: they have to be here already, else nothing
        is entered.
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


class PromptLogprobs:
    """The logprobs of one request's prompt, as far as they are known.

    With `store` they are looked up there and entered as they come; it has to keep as many
    alternatives as are asked for. Those before `start` are not wanted, and count as known.
    """

    __slots__ = ("count", "known", "store", "_entries", "_namespace", "_start", "_tokens", "_top")

    def __init__(
        self,
        prompt: array[int],
        namespace: Hashable,
        top: int,
        store: KnownLogprobs | None,
        start: int = 0,
    ) -> None:
        """`top` alternatives a token, 0 or more."""
        self.count = len(prompt)
        self.known = max(1, start)  # the first token has none
        self._start = start
        self.store = store
        self._tokens = prompt.tobytes()
        self._namespace = namespace
        self._top = top
        self._entries = Logprobs.blank(self.count, store.top if store is not None else top)

    @property
    def width(self) -> int:
        """Alternatives that are computed for each token."""
        return self._entries.top_ids.shape[1]

    def limit(self, length: int) -> int:
        """The longest hit that leaves the missing rows to be computed, at most `length` tokens.

        Looks up what has become known meanwhile. O(tokens of the prompt).
        """
        if self.known < self.count and self.store is not None:
            self.known = self.store.read(self._tokens, self._namespace, self.known, self._entries)
        return length if self.known == self.count else min(length, self.known - 1)

    def rows(self, start: int, count: int) -> range:
        """The positions whose rows are missing, of `count` that are computed from `start` on."""
        return range(max(start, self.known - 1), min(start + count, self.count - 1))

    def extend(self, entries: Logprobs) -> None:
        """Those of the next tokens, in order."""
        entries.copy_to(self._entries, slice(self.known, self.known + len(entries)))
        self.known += len(entries)

    def keep(self) -> None:
        """Enters what is known in the store."""
        if self.store is not None:
            tokens = self._tokens[: self.known * TOKEN_BYTES]
            self.store.store(tokens, self._namespace, self._entries[: self.known], self._start)

    def result(self) -> Logprobs:
        """Those of all prompt tokens; the first one, and those before the start, mean nothing."""
        assert self.known == self.count, "the prompt is not computed yet"
        entries = self._entries
        return Logprobs(
            entries.logprobs,
            entries.ranks,
            entries.top_ids[:, : self._top],
            entries.top_logprobs[:, : self._top],
        )


class PromptRows(NamedTuple):
    """Rows of a step that give the next of a prompt's missing logprobs, in order."""

    prompt: PromptLogprobs
    tokens: array[int]  # those that follow the rows' own tokens


def score_prompts(
    hidden: torch.Tensor, wanted: Seq[PromptRows], head: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Extends the logprobs of each prompt by its rows of `hidden` [S, hidden size], in order.

    `head` gives the logits of some rows; it is called for at most `SLICE_ROWS` at a time.
    """
    begin = 0  # row of the slice's first
    logits = hidden[:0]
    row = 0
    for prompt, tokens in wanted:
        done = 0
        while done < len(tokens):
            if row == begin + len(logits):
                begin = row
                logits = head(hidden[begin : begin + SLICE_ROWS])
            count = min(len(tokens) - done, begin + len(logits) - row)
            part = log_probabilities(logits[row - begin : row - begin + count])
            prompt.extend(of_tokens(part, tokens[done : done + count], prompt.width))
            done += count
            row += count
        prompt.keep()
