"""A folder of its own for each replica of a machine, which the next one finds again.

Only one engine at a time may have the folder of a disk cache. Replicas that are given the same one
share it: each takes the first of its sub-folders `replica-0`, `replica-1` ... that no other has.
"""

from __future__ import annotations

import fcntl
import os
from itertools import count
from pathlib import Path

_LOCK = "replica.lock"


class Slot:
    """The right to one of these sub-folders, for as long as this process has it and lives.

    Attributes:
        folder: the sub-folder.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder, self._lock = folder, lock

    @classmethod
    def of(cls, disk_cache: str) -> Slot:
        """Takes the first one that is free. O(replicas of the machine).

        What lies there stays, whichever replica has written it: all have the same model. Raises
        ValueError if the folder can't be used.
        """
        try:
            for number in count():
                slot = _taken(Path(disk_cache) / f"replica-{number}")
                if slot is not None:
                    return slot
        except OSError as error:
            raise ValueError(f"disk_cache: {disk_cache!r} can't be used: {error}") from error
        raise AssertionError("numbers do not end")

    def release(self) -> None:
        """Gives it back; a second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _taken(folder: Path) -> Slot | None:
    """The slot of a sub-folder; None if another replica, or the engine that it has left, has it."""
    # Here, so that replicas without a disk cache do not load it.
    from coppice.runtime.tiers.disk.folder import content, owner

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    slot = Slot(folder, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if owner(content(folder)) is None:
            return slot
    except BlockingIOError:
        pass
    except BaseException:
        slot.release()
        raise
    slot.release()
    return None
