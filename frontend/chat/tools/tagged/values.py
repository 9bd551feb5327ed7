"""Values of parameters between tags: which are text, and rules that hold texts to their schemas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any

from coppice.frontend.chat.marks import pattern
from coppice.runtime.sampling.forms.patterns import beyond_automata, with_ascii_classes

_MOST_COUNTED = 2000  # characters that an automaton counts
# Anchors and borders of words; what is escaped, and classes; groups and alternatives.
_PARTS = re.compile(r"\\[bBAzZ]|[\^$]|\\.|\[\^?+\]?+(?:\\.|[^\]\\])*+\]?+|[()|]", re.DOTALL)
_ANCHORS = ("\\b", "\\B", "\\A", "\\z", "\\Z", "^", "$")


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference in `root` leads to, or the schema itself."""
    for _ in range(8):  # references to references
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for step in PurePosixPath(reference[2:]).parts:
            schema = schema.get(step) if isinstance(schema, dict) else None
    return schema


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a value of the schema may be text; other values are JSON."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return True
    kinds = schema.get("type")
    if kinds is None:
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(alternatives, list):
            return any(is_text(each, root) for each in alternatives)
        values = schema.get("enum", [schema["const"]] if "const" in schema else [""])
        return any(isinstance(value, str) for value in values)
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


def choices(schema: Any) -> list[str] | None:
    """The texts that a value must be one of; None: it need not be one of certain texts."""
    if not isinstance(schema, dict):
        return None
    texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not texts or not isinstance(texts, list):
        return None
    return texts if all(isinstance(text, str) for text in texts) else None


def text_expression(schema: Any) -> str | None:
    """The Lark terminal of a text by `pattern`, `minLength` and `maxLength`; None: any text.

    A pattern may be found anywhere in the text, as JSON Schema says, unless it has an anchor at an
    end. One that no automaton follows, or that has an anchor in its middle, is left out.
    """
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return None
    parts = []
    if isinstance(wanted := schema.get("pattern"), str):
        parts += [found] if (found := _searched(wanted)) is not None else []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if _counts(least) and (most is None or _counts(most)) and (least or most is not None):
        parts.append(f"/(.|\\n){{{least},{'' if most is None else most}}}/")
    return " & ".join(f"({part})" for part in parts) or None


def terminal(expression: str, end: str) -> tuple[str, str]:
    """The name of a Lark terminal, and the rule of it: such a text up to the first `end`.

    An empty `end` is none: then something else ends the text.
    """
    last, whole = pattern(end), f"({expression})"
    if end:
        whole = f"({whole} /{last}/) & ~/(.|\\n)*{last}(.|\\n)+/"
    name = "TEXT_" + sha256(f"{expression}\n{end}".encode()).hexdigest()[:12].upper()
    return name, f"{name}: {whole}"


def _counts(number: Any) -> bool:
    good = isinstance(number, int) and not isinstance(number, bool)
    return good and 0 <= number <= _MOST_COUNTED


def _searched(wanted: str) -> str | None:
    """The terminal of a text in which a pattern is found; None if that can't be written."""
    if beyond_automata(wanted) or "\0" in wanted:
        return None
    begins = wanted.startswith("^")
    ends = wanted.endswith("$") and (len(wanted) - len(wanted[:-1].rstrip("\\"))) % 2 == 1
    inner = wanted[begins : len(wanted) - ends]
    depth = 0
    for found in _PARTS.findall(inner):
        depth += (found == "(") - (found == ")")
        if found in _ANCHORS or (found == "|" and not depth and (begins or ends)):
            return None
    try:
        inner = with_ascii_classes(inner)
    except ValueError:
        return None
    inner = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", inner, flags=re.DOTALL)
    inner = inner.replace("\n", "\\n")
    anything = "/(.|\\n)*/"
    body = f"/(?:{inner})/" if inner else '""'
    return f"{'' if begins else anything} {body} {'' if ends else anything}".strip()
