"""The interface of a tier: somewhere that packed pages are kept by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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


class HotPage(NamedTuple):
    """A page that was used often or lately, and where it is.

    Attributes:
        key: of the page.
        place: see `Place`.
        root: name with which its chain begins.
        above: index, among the pages that it was given with, of the page before; -1: it begins the
            chain.
    """

    key: PageKey
    place: Place
    root: bytes
    above: int


@dataclass(slots=True)
class Stored:
    """What a call of `Store.store` did.

    Attributes:
        written: pages.
        known: pages that were there already.
        gone: names of pages that it gave up for them.
    """

    written: int = 0
    known: int = 0
    gone: list[bytes] = field(default_factory=list)


class Store(ABC):
    """Keeps packed pages, all of `page_bytes`, by their keys; forgets some when it is full.

    Its calls come from several threads: `find` and `load` from those that read, at any time;
    `store` and `close` from one that writes. Each raises TierFailed when the tier can't be used,
    and nothing else; a page that is gone or damaged is no failure.

    Attributes:
        name: what reports call the tier, one of `TIERS`.
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

    def used_above(self, keys: Sequence[PageKey], times: int) -> list[PageKey]:
        """Counts that pages were hit so many times where they were needed, without being loaded.

        Returns those that it does not keep any more, as far as it can say.
        """
        return []

    def hottest(self, roots: Collection[bytes], most: int) -> list[HotPage]:
        """Up to `most` pages that were used most and last, each after the page before it.

        Of the chains that begin with `roots`, from their beginning on. Empty if it can't say.
        """
        return []

    def load_ahead(
        self, keys: Sequence[PageKey], places: Sequence[Place], out: np.ndarray
    ) -> list[bool]:
        """As `load`, for what nobody has asked for: it counts as no use of these pages."""
        return self.load(keys, places, out)

    @abstractmethod
    def close(self) -> None:
        """Ends its work; what was stored stays, unless it is memory of this process."""
