"""What this installation is: whether the core of the tree is compiled, and if not, why."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from coppice import radix

logger = logging.getLogger(__name__)

_PACKAGE = "coppice.radix"


def tree_state() -> str:
    """Whether the tree is compiled, in a few words; the reason, if it is not."""
    return radix.compiled.described(_PACKAGE, Path(radix.compiled.__file__).parent)


def log_build() -> None:
    """Logs it. It is no warning: `make` and pip say it, when they could not compile the tree."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    logger.info("Python %s, %s", version, tree_state())
