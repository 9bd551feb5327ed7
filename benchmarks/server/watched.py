"""What /proc reports about a process: memory, processor time, children."""

from __future__ import annotations

import os
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


class Watched:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def resident(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    def seconds(self) -> float:
        """Processor seconds of all its threads."""
        parts = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(parts[11]) + int(parts[12])) / TICK

    def children(self) -> list[int]:
        lists = Path(f"/proc/{self.pid}/task").glob("*/children")  # of each thread
        return [int(pid) for path in lists for pid in path.read_text().split()]
