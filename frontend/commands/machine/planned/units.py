"""Numbers of bytes as people write them: 80GiB, 60GB, 3.35TB/s."""

from __future__ import annotations

import argparse
import re

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)(?:/s)?", re.IGNORECASE)


def size(text: str) -> int:
    """Bytes: GiB counts by 1024, GB and G by 1000; a plain number is bytes.

    Raises argparse's error, which names the argument.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise argparse.ArgumentTypeError(
            f"must be a number of bytes such as 80GiB or 60GB, got {text!r}"
        )
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].upper()])
