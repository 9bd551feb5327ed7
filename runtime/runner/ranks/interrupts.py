"""An interrupt waits while ranks compute together: one that left would be missed by the others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Has an interrupt (Ctrl-C) that comes in this block act at its end.

    In other threads than the main one, which alone is interrupted, it does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        came.append(number)

    woken = signal.set_wakeup_fd(-1)  # an event loop would hear of it twice
    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(woken)
        if came:
            signal.raise_signal(signal.SIGINT)
