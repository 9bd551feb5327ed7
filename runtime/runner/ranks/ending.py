"""How a group of ranks comes to its end: once, with its reason, and so that nobody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from coppice.runtime.model.parallel.group import RankGroup

if TYPE_CHECKING:  # it loads compiled code, which engines of one rank do not need
    from coppice.kernels.cpu.ranks.memory import RankMemory


class EndingGroup(RankGroup):
    """What groups of processes have in common; see ``RankGroup``.

    Attributes:
        when_ended: is called once when the group ends by itself, in any thread; None: nothing is.
    """

    when_ended: Callable[[], None] | None = None

    def __init__(self, rank: int, size: int, waits: RankMemory | None, held: ExitStack) -> None:
        """``waits`` is where ranks may wait for each other; ``held`` is closed by ``close``."""
        self.rank, self.size = rank, size
        self._waits, self._held = waits, held
        self._reason: str | None = None
        self._ending = threading.Lock()

    @property
    def ended(self) -> str | None:
        if self._reason is None and self._waits is not None and self._waits.ended:
            return "another rank has ended"
        return self._reason

    def end(self, reason: str) -> None:
        with self._ending:
            if self._reason is not None:
                return
            self._reason = reason
            if self._waits is not None:
                self._waits.end()
        if self.when_ended is not None:
            self.when_ended()

    def close(self) -> None:
        self.when_ended = None
        self.end("the engine was closed")
        self._held.close()
