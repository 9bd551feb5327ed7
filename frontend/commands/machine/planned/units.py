"""Numbers as people write them: bytes (80GiB, 60GB, 3.35TB/s) and rates (990TFLOP/s)."""

from __future__ import annotations

import argparse
import re

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:FLOPS?)?(?:/s)?", re.IGNORECASE)
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


def rate(text: str) -> int:
    """FLOP a second: 990TFLOP/s, 990TFLOPS, 990T or a plain number.

    Raises argparse's error, which names the argument.
    """
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"must be a number of FLOP a second such as 990TFLOP/s, got {text!r}"
        )
    return int(float(found[1]) * 1000 ** _POWERS[found[2].upper()])
