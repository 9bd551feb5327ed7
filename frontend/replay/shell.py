"""What the pages of `replay` and `simulate` share: style, script, tables, and one file for all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

_FOLDER = Path(__file__).parent
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def fill(template: Path, parts: Mapping[str, str], charts: Mapping[str, go.Figure]) -> str:
    """The page: a template with its places filled, once, and everything that it loads inside.

    `parts` are HTML by the names of the places. A chart is drawn in the element whose id is its
    name after "chart-".
    """
    filled = {
        **parts,
        "style": _read("style.css"),
        "draw": _read("draw.js"),
        "charts": _embedded({name: _plain(figure) for name, figure in charts.items()}),
        "plotly": get_plotlyjs(),
    }
    text = template.read_text(encoding="utf-8")
    return _PLACE.sub(lambda place: filled[place.group(1)], text)


def _read(name: str) -> str:
    return "\n" + (_FOLDER / name).read_text(encoding="utf-8")


def _plain(figure: go.Figure) -> dict[str, Any]:
    """The figure as JSON, without plotly's template of styles."""
    made: dict[str, Any] = figure.to_plotly_json()
    del made["layout"]["template"]
    return made


def _embedded(value: Any) -> str:
    """JSON inside a script element: nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, escaped: bool = False) -> str:
    """A table as HTML; the cells are escaped here unless they are `escaped` already."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell if escaped else escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
