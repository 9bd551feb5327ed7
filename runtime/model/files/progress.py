"""How far loading has come: a bar on a terminal, else lines of the log, once it takes a while."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from coppice.runtime.startup.room import readable

logger = logging.getLogger(__name__)

_PATIENCE = 2.0  # seconds before anything is shown
_BETWEEN = 5.0  # seconds between lines of the log


class LoadingProgress:
    """Counts bytes that have been read of `total`, and shows them after two seconds.

    On a terminal a bar is drawn, which disappears at the end; elsewhere a line is logged every five
    seconds, and one at the end if there was one before. `clock` returns seconds.
    """

    def __init__(
        self,
        total: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        terminal: bool | None = None,
    ) -> None:
        self._total, self._clock = max(total, 1), clock
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._start = clock()
        self._next = self._start + _PATIENCE
        self._done, self._shown = 0, False
        self._bar: Any = None

    def __enter__(self) -> LoadingProgress:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._shown and kind is None:
            self._log()

    def add(self, size: int) -> None:
        """`size` more bytes of the files have become weights."""
        self._done += size
        if self._bar is not None:
            self._bar.update(size)
            return
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _BETWEEN
        self._shown = True
        if not self._terminal:
            self._log()
            return
        from tqdm import tqdm  # needed only here, and not by what loads in no time

        self._bar = tqdm(
            total=self._total,
            initial=self._done,
            desc="loading weights",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            dynamic_ncols=True,
            leave=False,
        )

    def _log(self) -> None:
        share = min(100, round(100 * self._done / self._total))
        spent = self._clock() - self._start
        logger.info("loading weights: %d %% of %s, %.0f s", share, readable(self._total), spent)
