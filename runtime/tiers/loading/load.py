"""The pages of one sequence on their way back from tiers: what is there, and what is still coming.

pages     0 ... cached | missing | found ............ found | missing
"ahead"                 computed   loaded from here -->
"behind"                computed --> meet <-- loaded from here
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from coppice.kernels.pages.transfers import Staged
from coppice.radix.accounting.log.loaded import FromTiers
from coppice.radix.mirror.names import PageKey
from coppice.runtime.requests.request import Sequence
from coppice.runtime.tiers.loading.rates import meeting
from coppice.runtime.tiers.store import Place


class FoundPage(NamedTuple):
    """A page that a tier has: `tier` is its index among the tiers."""

    tier: int
    key: PageKey
    place: Place


class LoadedPage(NamedTuple):
    """A page that was read: it is row `row` of `staged`."""

    found: FoundPage
    staged: Staged
    row: int


class Piece(NamedTuple):
    """Neighbouring pages of one tier that are read by one call, in the order of the prompt."""

    tier: int
    first: int
    pages: tuple[FoundPage, ...]


class Next(NamedTuple):
    """What a sequence does next.

    Attributes:
        ready: tokens, from the first one that is not computed, that can be taken over now.
        compute: tokens that it may compute; 0: it waits for what is on its way.
    """

    ready: int
    compute: int


class Load:
    """What was found for one sequence, and how far it has come. Used by the engine's thread alone.

    Attributes:
        sequence: for which it is.
        begin: its tokens that the tree had when tiers were asked.
        first: whether it has never run before.
        mark: what other sequences that would load the same share with it.
        finding: whether they have not answered yet.
        again: from when on they may be asked again, in seconds of a monotonic clock.
        asked: when the tier that is asked now was, likewise.
        asking: the index of the tier that is asked now; set by the thread that asks.
        answered: what those before it have; set by the thread that asks.
        before: what was answered to earlier questions.
        missed: names of pages that some tier does not have; likewise.
        together: see `Worth`.
        compute_rate, load_rate: tokens a second.
        began: when its sequence was first seen to run, and the tokens that it had computed then.
        pieces: that are being read, or are about to be.
        bonus: tokens, beside those in the tree, whose computing takes as long as loading saves.
        account: what was found and what came back, for the accounts of the sequence.
    """

    __slots__ = ("sequence", "begin", "first", "mark", "finding", "again", "asked", "asking",
                 "answered", "before", "missed", "together", "compute_rate", "load_rate", "began",
                 "served", "pieces", "bonus", "account", "_size", "_found", "_flying",
                 "_rows")  # fmt: skip

    def __init__(
        self,
        sequence: Sequence,
        begin: int,
        page_size: int,
        now: float,
        first: bool,
        mark: Hashable = None,
    ) -> None:
        self.sequence = sequence
        self.begin = begin
        self.first = first
        self.mark = mark
        self.finding = True
        self.again = 0.0
        self.asked = now
        self.asking = 0
        self.answered: dict[int, FoundPage] = {}
        self.before: dict[int, FoundPage] = {}
        self.missed: list[bytes] = []
        self.together = False
        self.compute_rate = self.load_rate = 1.0
        self.began: tuple[float, int] | None = None
        self.served = False  # something was taken over
        self.pieces = 0
        self.bonus = 0
        self.account = FromTiers()
        self._size = page_size
        # By index: what is to be read, what is being read, and what was, with its buffer and row.
        self._found: dict[int, FoundPage] = {}
        self._flying: dict[int, FoundPage] = {}
        self._rows: dict[int, LoadedPage] = {}

    @property
    def border(self) -> int:
        """The first token of the first page for which tiers were asked."""
        return self.begin // self._size * self._size

    def ask_again(self, begin: int, mark: Hashable, later: float) -> None:
        """Tiers are about to be asked for the tokens from `begin` to `border`, too.

        The tree had them, and has lost them. `later`: when they may be asked the next time.
        """
        self.begin, self.mark, self.again = begin, mark, later
        self.finding = True
        self.before |= self.answered
        self.answered, self.missed = {}, []

    def found(self, pages: dict[int, FoundPage]) -> None:
        """Takes what is worth loading, by index of the page; what was found before stays."""
        self._found.update(pages)

    @property
    def over(self) -> bool:
        """Whether nothing is there, and nothing will come."""
        return not (self.finding or self._found or self._flying or self._rows)

    @property
    def coming(self) -> bool:
        """Whether something is on its way that is not there."""
        return bool(self.finding or self._flying)

    @property
    def tiers(self) -> set[int]:
        """The tiers of which something is to come. O(its pages)."""
        return {page.tier for pages in (self._found, self._flying) for page in pages.values()}

    @property
    def staged(self) -> int:
        """Pages that were read and are not taken over."""
        return len(self._rows)

    @property
    def flying(self) -> int:
        """Pages that are being read, or are about to be."""
        return len(self._flying)

    def piece(self, most: Seq[int]) -> Piece | None:
        """Takes the next pages to be read, all of one tier, as many as `most` has for it.

        None: nothing is left.

        What is computed meanwhile is left out. So is, where a part is computed, what lies before
        the place where the two will meet.
        """
        computed, size = self.sequence.computed, self._size
        for index in [at for at, each in self._found.items() if self._end(at, each) <= computed]:
            del self._found[index]
        if not self._found:
            return None
        step, floor, index = 1, 0, min(self._found)
        if self.together:
            step, index = -1, max(self._found)
            floor = self._meeting(computed, self._border(computed, (index + 1) * size)) // size
        tier, taken = self._found[index].tier, list[int]()
        while (
            len(taken) < most[tier]
            and index >= floor
            and index in self._found
            and self._found[index].tier == tier
        ):
            taken.append(index)
            index += step
        if not taken:
            return None
        taken.sort()
        pages = [self._found.pop(index) for index in taken]
        self._flying.update(zip(taken, pages, strict=True))
        self.pieces += 1
        return Piece(tier, taken[0], tuple(pages))

    def withdraw(self, piece: Piece) -> None:
        """Puts back a piece that no thread has begun to read."""
        self.pieces -= 1
        for row in range(len(piece.pages)):
            found = self._flying.pop(piece.first + row, None)
            if found is not None:
                self._found[piece.first + row] = found

    def came(self, piece: Piece, staged: Staged | None, right: Seq[bool]) -> None:
        """Takes a piece that was read, of which some rows may be wrong; None: none could be."""
        self.pieces -= 1
        for row in range(len(piece.pages)):
            # It is no longer among those if the load was given up.
            found = self._flying.pop(piece.first + row, None)
            if found is not None and staged is not None and right[row]:
                self._rows[piece.first + row] = LoadedPage(found, staged, row)

    def give_up(self, tier: int | None = None) -> None:
        """What is not there yet is computed; with a `tier`, what would come from it."""
        self.finding = False
        for pages in (self._found, self._flying):
            for at in [at for at, each in pages.items() if tier is None or each.tier == tier]:
                del pages[at]

    def forget(self) -> None:
        """Gives up what is there, too: nobody will take it."""
        self._rows.clear()

    def _end(self, index: int, found: FoundPage) -> int:
        """The position after the last token of a page that is of use."""
        return index * self._size + found.place.tokens

    def next(self, computed: int, count: int, most: int) -> Next:
        """What a sequence with `computed` tokens, `count` more to compute, does now.

        At most `most` pages are taken over at once. O(pages that are there or on their way).
        """
        size, index = self._size, computed // self._size
        for at in [at for at, each in self._rows.items() if self._end(at, each.found) <= computed]:
            del self._rows[at]
        end = computed
        for at in range(index, index + most):
            if at not in self._rows:
                break
            end = self._end(at, self._rows[at].found)
            if end % size:
                break
        if end > computed:
            return Next(end - computed, 0)
        if self.finding or index in self._flying:
            return Next(0, 0)
        if index in self._found and not self.together:
            return Next(0, 0)  # a thread is about to read it
        border = self._border(computed, computed + count)
        if not self.together:
            border = min([border, *(at * size for at in self._found if at > index)])
        elif index in self._found:
            border = min(border, self._meeting(computed, border))
        return Next(0, min(count, border - computed))

    def _border(self, computed: int, end: int) -> int:
        """The first position after `computed` at which something is there or comes; else `end`."""
        index = computed // self._size
        stops = [at for at in (*self._rows, *self._flying) if at > index]
        return min(stops) * self._size if stops else end

    def _meeting(self, computed: int, border: int) -> int:
        """Where computing from `computed` on meets loading from `border` back: a page's begin.

        What is on its way after `border` comes first.
        """
        gap = border - computed + len(self._flying) * self._size
        met = computed + meeting(gap, self.load_rate, self.compute_rate)
        return min(border, -(-met // self._size) * self._size)

    def take(self, computed: int, tokens: int) -> list[LoadedPage]:
        """Takes the rows of the next `tokens`, which `next` has offered, in order."""
        size = self._size
        first, last = computed // size, (computed + tokens - 1) // size
        return [self._rows.pop(index) for index in range(first, last + 1)]
