"""What the rules of a sequence know of its tokens: how often each was generated, which are bad."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from coppice.runtime.requests.request import Sequence


class TokenCounts:
    """The distinct tokens of a sequence, and how often each was generated; updated token by token.

    `prompt` tokens are listed with the count 0, where they matter.
    """

    __slots__ = ("ids", "times", "_counted", "_place")

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self.ids = array("i", self._place)
        self.times = array("i", bytes(self.ids.itemsize * len(self.ids)))
        self._counted = 0

    def update(self, sequence: Sequence) -> None:
        """Counts what the sequence has generated since the last call. O(those tokens)."""
        begin = len(sequence.request.prompt_token_ids) + self._counted
        for token in sequence.tokens[begin:]:
            place = self._place.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.times.append(0)
            self.times[place] += 1
        self._counted = sequence.num_generated

    def copy(self) -> TokenCounts:
        """Counts as of now, for a fork. O(distinct tokens)."""
        other = TokenCounts()
        other.ids, other.times = self.ids[:], self.times[:]
        other._place, other._counted = self._place.copy(), self._counted
        return other


class BadWords:
    """Token sequences of which the last token is forbidden wherever the others come before it.

    The tokens before it may be of the prompt, as in transformers' NoBadWordsLogitsProcessor.
    """

    __slots__ = ("single", "_by_last")

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self.single: list[int] = []  # words of one token, which are forbidden everywhere
        # The longer ones: by the token before their last and their number of tokens, from the bytes
        # of all tokens but the last to the last ones. However many there are, a look-up for each
        # length finds those that could be completed.
        self._by_last: dict[int, dict[int, dict[bytes, list[int]]]] = {}
        for word in dict.fromkeys(words):
            if len(word) == 1:
                self.single.append(word[0])
            else:
                start = array("i", word[:-1])
                lengths = self._by_last.setdefault(start[-1], {})
                starts = lengths.setdefault(len(start), {})
                starts.setdefault(start.tobytes(), []).append(word[-1])

    def completing(self, tokens: array[int]) -> list[int]:
        """The tokens that would complete a word of more than one token after `tokens`."""
        found: list[int] = []
        for length, starts in self._by_last.get(tokens[-1], {}).items() if self._by_last else ():
            found += starts.get(tokens[-length:].tobytes(), ())
        return found
