"""Log-probabilities of chosen tokens and of the most probable ones at their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """The log-probability of each of n tokens, and the k highest ones at the token's position.

    A token's rank is 1 plus the number of tokens that are more probable at its place, so equally
    probable tokens have the same rank.
    """

    logprobs: np.ndarray  # float32 [n]: of the token itself
    ranks: np.ndarray  # int32 [n]: of the token itself
    top_ids: np.ndarray  # int32 [n, k]: the most probable first
    top_logprobs: np.ndarray  # float32 [n, k]

    def __len__(self) -> int:
        return len(self.logprobs)

    def __getitem__(self, places: slice | np.ndarray) -> Logprobs:
        """The entries of some places: views for a slice, copies for indices int [m]."""
        return Logprobs(
            self.logprobs[places],
            self.ranks[places],
            self.top_ids[places],
            self.top_logprobs[places],
        )

    def copy_to(self, other: Logprobs, at: slice | np.ndarray) -> None:
        """Overwrites the places `at` of another one with the same k."""
        for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
            getattr(other, name)[at] = getattr(self, name)

    def top_ranks(self) -> np.ndarray:
        """Ranks of the most probable ones, int32 [n, k]."""
        places = np.arange(self.top_ids.shape[1], dtype=np.int32)
        less = np.ones(self.top_ids.shape, np.bool_)
        less[:, 1:] = self.top_logprobs[:, 1:] < self.top_logprobs[:, :-1]
        return np.maximum.accumulate(np.where(less, places, 0), axis=1) + 1

    @staticmethod
    def joined(parts: Sequence[Logprobs]) -> Logprobs:
        """The entries of all parts in order; at least one part, all with the same k."""
        return Logprobs(
            np.concatenate([each.logprobs for each in parts]),
            np.concatenate([each.ranks for each in parts]),
            np.concatenate([each.top_ids for each in parts]),
            np.concatenate([each.top_logprobs for each in parts]),
        )

    @staticmethod
    def blank(count: int, top: int) -> Logprobs:
        """Zeros for `count` tokens with `top` others each; memory is taken as it is written."""
        return Logprobs(
            np.zeros(count, np.float32),
            np.zeros(count, np.int32),
            np.zeros((count, top), np.int32),
            np.zeros((count, top), np.float32),
        )
