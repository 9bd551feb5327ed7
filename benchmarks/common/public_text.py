"""Text that every installation of Python holds: its documentation's topics, and its own sources.

Prose comes from ``pydoc_data/topics.py``, code from modules of the standard library. Texts of one
version of Python are the same everywhere; the digest of what was read stands beside each result, so
that results on other texts are not compared by mistake. The repository's own pages would change
with every commit.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

CODE = ("argparse.py", "statistics.py", "heapq.py", "textwrap.py", "dataclasses.py", "tempfile.py")
TOPICS = "pydoc_data/topics.py"


@dataclass(frozen=True, slots=True)
class Text:
    """Windows of equally many tokens, half of them prose, and the digest of their ids."""

    windows: tuple[tuple[int, ...], ...]
    digest: str


def public_text(encode: Callable[[str], Sequence[int]], windows: int, length: int) -> Text:
    """The first ``windows`` windows of ``length`` tokens: of prose and of code, alternately.

    ``encode`` makes token ids of a text. Raises ``ValueError`` where the text is too short.
    """
    half = -(-windows // 2)
    parts = [_windows(encode, text, half, length) for text in (prose(), code())]
    chosen = tuple(window for pair in zip(*parts, strict=True) for window in pair)[:windows]
    return Text(chosen, hashlib.sha256(repr(chosen).encode()).hexdigest()[:16])


def _windows(
    encode: Callable[[str], Sequence[int]], text: str, count: int, length: int
) -> list[tuple[int, ...]]:
    # A token has at most some six characters on average here; all of it would take seconds.
    tokens = encode(text[: 8 * count * length])
    if len(tokens) < count * length:
        raise ValueError(f"the text has {len(tokens)} tokens; {count} x {length} are asked for")
    return [tuple(tokens[at * length : (at + 1) * length]) for at in range(count)]


def prose() -> str:
    """Python's documentation of its language, by topic."""
    module = ast.parse((library() / TOPICS).read_text())
    tables = [node.value for node in module.body if isinstance(node, ast.Assign)]
    topics: dict[str, str] = ast.literal_eval(tables[0])
    return "\n\n".join(topics[name] for name in sorted(topics))


def code() -> str:
    """Modules of the standard library."""
    return "\n\n".join((library() / name).read_text() for name in CODE)


def library() -> Path:
    """The folder of Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))
