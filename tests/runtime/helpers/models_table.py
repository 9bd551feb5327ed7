"""The tables of docs/models.md: which family was seen to do what.

Tests that show it have a mark `model(*FEATURES)` and a parameter `family`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from coppice.runtime.model.families.registry import FAMILIES

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "models.md"

# The columns of the tables, and what each promises.
FEATURES = {
    "logits": "those of transformers, for a whole prompt, in chunks and token by token",
    "tokens": "greedy ones equal transformers' cold and from the cache, with several page sizes",
    "n": "several results of a request are the same with and without the cache",
    "beams": "sequences are those of transformers' beam search",
    "int8": "on a CPU: tokens from the cache equal cold ones",
    "int4": "on a CPU: tokens from the cache equal cold ones",
    "adapters": "LoRA: tokens equal those of the merged model, cold and from the cache; of experts "
    "the attention alone",
    "triton": "logits equal transformers' with the GPU's kernels, interpreted on a CPU",
    "sm_90": "attention with its published heads, windows and soft-cap compiles for an H100 or "
    "H200, without spilled registers",
}
OURS, OTHERS = "families", "through transformers"
COLUMNS = {OURS: tuple(FEATURES), OTHERS: ("tokens", "n", "beams", "int8")}

_ROW = re.compile(r"^\| `([^`]+)` \|(.*)\|$", re.MULTILINE)


def documented(table: str) -> dict[str, set[str]]:
    """The families of a table of the document, and the features that each has."""
    text = (
        DOCUMENT.read_text(encoding="utf-8").partition(_begin(table))[2].partition(_end(table))[0]
    )
    return {
        family: {
            feature
            for feature, cell in zip(COLUMNS[table], cells.split("|"), strict=True)
            if cell.strip() == "yes"
        }
        for family, cells in _ROW.findall(text)
    }


def write(file: Path, seen: Mapping[str, set[str]]) -> None:
    """Replaces both tables in a document; families of our own are all in the first."""
    text = file.read_text(encoding="utf-8")
    for table, families in ((OURS, FAMILIES), (OTHERS, sorted(set(seen) - set(FAMILIES)))):
        before, _, rest = text.partition(_begin(table))
        after = rest.partition(_end(table))[2]
        text = (
            f"{before}{_begin(table)}{_lines(families, seen, COLUMNS[table])}{_end(table)}{after}"
        )
    file.write_text(text, encoding="utf-8")


def _lines(families: Iterable[str], seen: Mapping[str, set[str]], columns: Sequence[str]) -> str:
    lines = [f"| family | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for family in families:
        has = seen.get(family, set())
        cells = ("yes" if each in has else "" for each in columns)
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _begin(table: str) -> str:
    return f"<!-- {table} begin -->\n"


def _end(table: str) -> str:
    return f"<!-- {table} end -->"
