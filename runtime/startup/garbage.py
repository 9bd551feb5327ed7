"""Python's garbage collector during a start: kept from looking at what has come to stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Looks for no garbage meanwhile, and not soon after among what has come: imports, a model.

    To look through it takes a quarter of a second each time, and there is none.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():
                # All objects are as old as can be now, without having been looked at.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
