"""The table of docs/clients.md: which client was seen to do what, over which API.

Each test of this folder has a mark `client(NAME, API, *FEATURES)`.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.frontend.clients.by_hand import TRIED

FOLDER = Path(__file__).resolve().parent
DOCUMENT = FOLDER.parents[2] / "docs" / "clients.md"

# The columns of the table, and what each promises.
FEATURES = {
    "text": "a whole answer, with its counts of tokens",
    "stream": "the same answer in pieces",
    "tools": "calls that fit the tools' schemas, and a tool's result sent back",
    "schema": "an answer that fits a schema",
    "errors": "a refused request becomes the client's own error",
}

Seen = dict[tuple[str, str], set[str]]  # features by client and API
_BEGIN, _END = "<!-- the table begins -->\n", "<!-- the table ends -->"
_BEGIN_BY_HAND, _END_BY_HAND = "<!-- by hand begins -->\n", "<!-- by hand ends -->"
_ROW = re.compile(r"^\| `([^`]+)` [^|]*\| `([^`]+)` \|(.*)\|$", re.MULTILINE)


def marked() -> Seen:
    """What the marks of this folder's tests name."""
    seen: Seen = defaultdict(set)
    for file in FOLDER.glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.client":
                client, api, *features = (ast.literal_eval(argument) for argument in node.args)
                seen[client, api].update(features)
    return dict(seen)


def documented() -> Seen:
    """What the table of the document has."""
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = _ROW.findall(text.partition(_BEGIN)[2].partition(_END)[0])
    return {
        (client, api): {
            feature
            for feature, cell in zip(FEATURES, cells.split("|"), strict=True)
            if cell.strip() == "yes"
        }
        for client, api, cells in rows
    }


def write(file: Path, seen: Mapping[tuple[str, str], set[str]]) -> None:
    """Replaces the table in a document."""
    lines = [
        f"| client | API | {' | '.join(FEATURES)} |",
        f"| --- | --- |{' --- |' * len(FEATURES)}",
    ]
    for (client, api), features in sorted(seen.items()):
        cells = " | ".join("yes" if name in features else "" for name in FEATURES)
        lines.append(f"| `{client}` {_version(client)} | `{api}` | {cells} |")
    text = _replaced(file.read_text(encoding="utf-8"), _BEGIN, _END, lines)
    text = _replaced(text, _BEGIN_BY_HAND, _END_BY_HAND, by_hand())
    file.write_text(text, encoding="utf-8")


def by_hand() -> list[str]:
    """The lines of the second table: what was tried by hand."""
    rows = [
        f"| `{one.client}` {one.version} | {one.date} | {one.did} | {one.surprises} |"
        for one in sorted(TRIED, key=lambda one: one.client)
    ]
    return ["| client | tried on | worked | surprises |", "| --- | --- | --- | --- |", *rows]


def _replaced(text: str, begin: str, end: str, lines: list[str]) -> str:
    """The text with lines between two marks in place of those that were there."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{chr(10).join(lines)}\n{end}{rest.partition(end)[2]}"


def _version(client: str) -> str:
    """Of a Python package, or of one of npm, which has that prefix."""
    name = client.removeprefix("npm:")
    if name == client:
        try:
            return version(name)
        except PackageNotFoundError:
            return ""
    lock = json.loads((FOLDER / "node" / "package-lock.json").read_text(encoding="utf-8"))
    found: str = lock["packages"][f"node_modules/{name}"]["version"]
    return found
