"""The interface of a tier: somewhere that packed pages are kept by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coppice.radix.mirror.names import PageKey


class TierFailed(RuntimeError):
    """A tier can't be used now: its message says which one, what failed and what may help."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a store keeps one page, and how many of the tokens that were asked for it covers.

    `at` is the store's own.
    """

    tokens: int
    at: Any


@dataclass(slots=True)
class Stored:
    """What a call of `Store.store` did: pages written, and those that were there already."""

    written: int = 0
    known: int = 0


class Store(ABC):
    """Keeps packed pages, all of `page_bytes`, by their keys; forgets some when it is full.

    Its calls come from several threads: `find` and `load` from those that read, at any time;
    `store` and `close` from one that writes. Each raises TierFailed when the tier can't be used,
    and nothing else; a page that is gone or damaged is no failure.

    Attributes:
        name: what reports call the tier.
    """

    name: str

    @abstractmethod
    def find(self, keys: Sequence[PageKey]) -> list[Place | None]:
        """Where exactly these pages are, each with all of its tokens; None for one that is not."""

    @abstractmethod
    def find_longest(self, key: PageKey) -> Place | None:
        """Where a page is that follows the same parent and begins with most of these tokens.

        None if not even the first token agrees. `Place.tokens` is the number of tokens that agree.
        """

    @abstractmethod
    def load(self, keys: Sequence[PageKey], places: Sequence[Place], out: np.ndarray) -> list[bool]:
        """Reads pages that were found for these keys to `out`, uint8 ``[len(keys), page_bytes]``.

        Returns which rows are right; a page that is gone or damaged leaves its row undefined.
        """

    @abstractmethod
    def store(self, keys: Sequence[PageKey], pages: np.ndarray) -> Stored:
        """Keeps pages, uint8 ``[len(keys), page_bytes]``, which others can find from now on."""

    def kept_bytes(self, page_bytes: int) -> int:
        """The bytes that it keeps for a page of `page_bytes`."""
        return page_bytes

    @property
    @abstractmethod
    def capacity(self) -> int | None:
        """The most bytes that it keeps; None: the server decides."""

    @property
    @abstractmethod
    def used(self) -> int | None:
        """Bytes that it keeps now, about; None if it can't say."""

    @property
    def damaged(self) -> int:
        """Pages that were found damaged since the start."""
        return 0

    def hottest(self, most: int) -> list[list[PageKey]]:
        """Chains of up to `most` pages in all that were used most, from the root; may be empty."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Ends its work; what was stored stays, unless it is memory of this process."""
