"""What can be sent to the process of an engine."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any


def check_sendable(processors: Sequence[Callable[..., Any]]) -> None:
    """Checks `logits_processors`, which are sent by the name under which they can be imported.

    Raises ValueError for one that the engine's process would not find.
    """
    for number, each in enumerate(processors):
        try:
            pickle.dumps(each)
        except Exception as error:
            raise ValueError(
                f"logits_processors[{number}] must be a function of a module, or an object that "
                f"can be pickled, for the engine's process to find it; got {each!r}: {error}"
            ) from error
        kind = each if hasattr(each, "__qualname__") else type(each)
        main = sys.modules["__main__"]
        if kind.__module__ == "__main__" and not hasattr(main, "__file__"):
            raise ValueError(
                f"logits_processors[{number}] must be of a file, which the engine's process can "
                f"import, not of an interactive session; got {each!r}"
            )
