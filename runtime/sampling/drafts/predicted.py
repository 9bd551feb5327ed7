"""Drafts from the text that a client expects: OpenAI's parameter `prediction`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from itertools import pairwise
from weakref import WeakValueDictionary

from coppice.runtime.requests.request import Sequence
from coppice.runtime.sampling.drafts.source import Proposed

SOURCE = "prediction"

_COMPARED = 16  # tokens before a place that are compared to find where the text goes on
_AHEAD = 32  # tokens after the last place in which one equal token is enough to go on
_LENGTHS = (0, 1, 2, 4, 8, 16)  # equal tokens from which others are as likely
_FIRST = (0.3, 0.5, 0.75, 0.85, 0.93, 0.97)
_BEGIN = 4  # equal tokens that the beginning of a text counts as
# Places of two tokens that are compared, half before the last place and half after it: a bound of
# what one request may take of the engine's time.
_MOST_PLACES = 64


class _Prediction:
    """Predicted tokens, and where each two of them are: the same for all samples of a request."""

    __slots__ = ("__weakref__", "_pairs", "tokens")

    def __init__(self, tokens: Seq[int]) -> None:
        self.tokens = tokens
        self._pairs: dict[tuple[int, int], list[int]] | None = None

    def places(self, first: int, second: int) -> Seq[int]:
        """The indices of `second` after `first`, ascending. O(tokens) at the first call."""
        if self._pairs is None:
            self._pairs = {}
            for place, pair in enumerate(pairwise(self.tokens), 1):
                self._pairs.setdefault(pair, []).append(place)
        return self._pairs.get((first, second), ())


class _Follower:
    """Where in its prediction a text is."""

    __slots__ = ("at", "equal", "length", "prediction")

    def __init__(self, prediction: _Prediction, length: int) -> None:
        self.prediction = prediction
        self.length = length  # of the sequence, up to where it was followed
        self.at = 0  # the predicted token that should come next
        self.equal = _BEGIN  # tokens before it that were as predicted

    def follow(self, tokens: Seq[int], begin: int) -> None:
        """Moves on by the tokens that have come; the output begins at index `begin`."""
        predicted = self.prediction.tokens
        for index in range(self.length, len(tokens)):
            token = tokens[index]
            if self.at < len(predicted) and predicted[self.at] == token:
                self.at += 1
                self.equal += 1
            else:
                self._find(tokens, index, begin)
        self.length = len(tokens)

    def _find(self, tokens: Seq[int], index: int, begin: int) -> None:
        """Goes on where the last tokens, up to `index`, are predicted."""
        predicted, token = self.prediction.tokens, tokens[index]
        best: tuple[int, int] | None = None
        places = self.prediction.places(tokens[index - 1], token) if index > begin else ()
        middle, half = bisect_left(places, self.at), _MOST_PLACES // 2
        for place in places[max(middle - half, 0) : middle + half]:
            equal = 2
            most = min(_COMPARED, place + 1, index + 1 - begin)
            while equal < most and predicted[place - equal] == tokens[index - equal]:
                equal += 1
            # Of equals the next one after the last place, else the nearest before it.
            distance = place - self.at if place >= self.at else 2 * len(predicted) - place
            if best is None or (-equal, distance) < best:
                best = -equal, distance
                self.equal, found = equal, place
        if best is not None:
            self.at = found + 1
            return
        for place in range(self.at, min(self.at + _AHEAD, len(predicted))):
            if predicted[place] == token:
                self.at, self.equal = place + 1, 1
                return
        # As if one token stood in the place of another, once.
        self.at += self.equal > 0
        self.equal = 0


class PredictedDrafts:
    """Follows the predictions of requests: as long as they hold, and again after they did not."""

    def __init__(self) -> None:
        self._followers: dict[Sequence, _Follower] = {}
        # By the identity of their tokens; each is kept by its followers alone.
        self._predictions: WeakValueDictionary[int, _Prediction] = WeakValueDictionary()

    def propose(self, sequence: Sequence, most: int) -> list[Proposed]:
        """What is predicted to come next."""
        predicted = sequence.request.params.prediction_token_ids
        if not predicted:
            return []
        begin = len(sequence.request.prompt_token_ids)
        follower = self._followers.get(sequence)
        if follower is None:
            follower = self._followers[sequence] = _Follower(self._prediction(predicted), begin)
        follower.follow(sequence.tokens, begin)
        made = []
        coming = predicted[follower.at : follower.at + most]
        for number, token in enumerate(coming):
            alike = bisect_right(_LENGTHS, follower.equal + number) - 1
            made.append(Proposed(token, number - 1, (SOURCE, alike), _FIRST[alike]))
        return made

    def _prediction(self, tokens: Seq[int]) -> _Prediction:
        """That of these tokens, which all sequences of a request have as one object."""
        found = self._predictions.get(id(tokens))
        if found is None:
            found = self._predictions[id(tokens)] = _Prediction(tokens)
        return found

    def forget(self) -> None:
        """It keeps no text of finished sequences."""

    def forget_adapter(self, identity: str, mark: int | None) -> None:
        """Nor of adapters."""

    def ended(self, sequence: Sequence) -> None:
        """Forgets where it was."""
        self._followers.pop(sequence, None)
