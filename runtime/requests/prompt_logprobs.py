"""Log-probabilities of one request's prompt: which are known, and which rows give the others.

A prompt token's logprobs come from the row of logits of the token before it. Tokens that hit the
cache are not computed and have no rows, so a request for prompt logprobs hits only as far as its
logprobs are known already (`PromptLogprobs.limit`), and computes the others:

    tokens     t0  t1  t2  t3  t4  t5  t6        logprobs of t0 .. t3 are known:
    known       *   *   *   *                    the rows of t0, t1, t2 are not needed,
    hit        [-----------]                     a hit may have up to three tokens,
    rows needed             t3  t4  t5           these give the logprobs of t4, t5, t6
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from coppice.radix.tokens import TOKEN_BYTES
from coppice.runtime.requests.logprobs import Logprobs


class LogprobStore(Protocol):
    """Prompt logprobs of earlier requests, by prefix; `tokens` are int32 bytes.

    Attributes:
        top: alternatives that are kept of each token.
    """

    top: int

    def read(self, tokens: bytes, namespace: Hashable, known: int, into: Logprobs) -> int:
        """Copies the known logprobs of `tokens` from `known` on; returns how many are known now."""
        ...

    def store(self, tokens: bytes, namespace: Hashable, entries: Logprobs, start: int) -> None:
        """Keeps the logprobs of all `tokens`; the first `start` entries are undefined."""


class PromptLogprobs:
    """The logprobs of one request's prompt, as far as they are known.

    With `store` they are looked up there, and stored as they are computed; it must keep at least
    the `top` alternatives of each. Those before `start` were not asked for and count as known.
    """

    limits_hits = True

    __slots__ = ("count", "known", "store", "_entries", "_namespace", "_start", "_tokens", "_top")

    def __init__(
        self,
        prompt: bytes,
        namespace: Hashable,
        top: int,
        store: LogprobStore | None,
        start: int = 0,
    ) -> None:
        """`prompt` as int32 bytes, as trees call it; `top` alternatives a token, 0 or more."""
        self.count = len(prompt) // TOKEN_BYTES
        self.known = max(1, start)  # the first token has none
        self._start = start
        self.store = store
        self._tokens = prompt
        self._namespace = namespace
        self._top = top
        self._entries = Logprobs.blank(self.count, store.top if store is not None else top)

    @property
    def width(self) -> int:
        """Alternatives that are computed for each token."""
        return self._entries.top_ids.shape[1]

    def limit(self, length: int) -> int:
        """The longest hit that leaves the missing rows to be computed, at most `length` tokens.

        Reads what other requests have stored since the last call. O(tokens of the prompt).
        """
        if self.known < self.count and self.store is not None:
            self.known = self.store.read(self._tokens, self._namespace, self.known, self._entries)
        return length if self.known == self.count else min(length, self.known - 1)

    def rows(self, start: int, count: int) -> range:
        """The positions whose rows are missing, of `count` that are computed from `start` on."""
        return range(max(start, self.known - 1), min(start + count, self.count - 1))

    def extend(self, entries: Logprobs) -> None:
        """Adds the logprobs of the next tokens, in order."""
        entries.copy_to(self._entries, slice(self.known, self.known + len(entries)))
        self.known += len(entries)

    def keep(self) -> None:
        """Copies the known logprobs to the store, if there is one."""
        if self.store is not None:
            tokens = self._tokens[: self.known * TOKEN_BYTES]
            self.store.store(tokens, self._namespace, self._entries[: self.known], self._start)

    def result(self) -> Logprobs:
        """The logprobs of all prompt tokens; undefined for the first and those before `start`."""
        assert self.known == self.count, "the prompt is not computed yet"
        entries = self._entries
        return Logprobs(
            entries.logprobs,
            entries.ranks,
            entries.top_ids[:, : self._top],
            entries.top_logprobs[:, : self._top],
        )
