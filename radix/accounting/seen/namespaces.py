"""Which namespace has seen a prefix: keys by namespace in one table, and those of all others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from coppice.radix.accounting.seen.hashes import Hashes, Ints, keys, namespace_salt
from coppice.radix.accounting.seen.prefix_table import PrefixTable

# The salt of prefixes that any namespace but the first has seen.
_ELSEWHERE = np.uint64(0xA0761D6478BD642F)


class Namespaces:
    """The salts of namespaces; the first one's keys have none.

    While it is the only one, prefixes are not looked up in others.
    """

    def __init__(self) -> None:
        self._home: tuple[Hashable] | None = None
        self.several = False

    def salts(self, names: Sequence[Hashable]) -> list[int]:
        """The salt of each namespace; 0 is that of the first one ever."""
        if not names:
            return []
        if self._home is None:
            self._home = (names[0],)
        (home,) = self._home
        if not self.several and names.count(home) == len(names):
            return [0] * len(names)
        self.several = True
        return [0 if name == home else namespace_salt(name) for name in names]

    def peek(self, name: Hashable) -> int:
        """The salt that a namespace would get; remembers nothing."""
        return 0 if self._home is None or self._home == (name,) else namespace_salt(name)

    def see(
        self,
        table: PrefixTable,
        own: Hashes,
        hashes: Hashes,
        salts: Hashes,
        piece: Ints,
        stamps: Hashes,
    ) -> tuple[Hashes, Hashes | None]:
        """When each prefix was seen in its own and in other namespaces: stamps, 0 for never.

        Sees them all now (`PrefixTable.see`). `own` are the keys of `hashes` with `salts`. The
        second is None with one namespace.
        """
        if not self.several:
            return table.see(own, piece, stamps), None
        # All others than the first namespace enter their prefixes a second time, under one salt
        # for them all; these and the first's together are what any namespace has seen.
        rows = len(piece)
        both = np.concatenate((own, keys(hashes, _ELSEWHERE), keys(hashes, np.uint64(0))))
        writes = np.concatenate((np.ones(rows, np.bool_), salts != 0, np.zeros(rows, np.bool_)))
        piece = np.tile(piece, 3)
        order = np.argsort(piece.astype(np.uint16), kind="stable")
        seen = np.empty_like(both)
        seen[order] = table.see(both[order], piece[order], np.tile(stamps, 3)[order], writes[order])
        return seen[:rows], np.maximum(seen[rows : 2 * rows], seen[2 * rows :])

    def known_elsewhere(self, table: PrefixTable, hashes: Hashes, salt: int) -> Hashes | None:
        """When each prefix was seen in any namespace; enters none. None with one namespace."""
        if not salt and not self.several:
            return None
        others = table.known(keys(hashes, _ELSEWHERE))
        return np.maximum(others, table.known(keys(hashes, np.uint64(0))))

    @staticmethod
    def forget(table: PrefixTable, hashes: Hashes, salt: int, stamp: int, alone: bool) -> None:
        """Forgets prefixes that were seen last with `stamp`; if `alone`, in any other, too."""
        forgotten = [keys(hashes, np.uint64(salt))]
        if salt and alone:
            forgotten.append(keys(hashes, _ELSEWHERE))
        table.forget(np.concatenate(forgotten), stamp)
