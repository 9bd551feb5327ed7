"""Regular expressions as clients write them: ASCII classes, look-arounds, all strings but some."""

from __future__ import annotations

import re
from collections.abc import Collection

from coppice.runtime.sampling.grammar_library import regex_to_lark

#: An expression that begins with it means Unicode's digits, letters and white space.
UNICODE = "(?u)"
# Look-ahead, look-behind and references to groups; an automaton can follow none of them.
_BEYOND_AUTOMATA = re.compile(r"\\(?:[1-9]|k<)|\(\?(?:[=!]|<[=!])|\\.", re.DOTALL)
_MOST_CHARACTERS = 400  # of strings that an expression leaves out
_LONGEST = 60  # such a string: groups are nested as deep


def with_ascii_classes(expression: str) -> str:
    r"""The expression with `\d`, `\w`, `\s` as ASCII's, unless it begins with `(?u)`."""
    if expression.startswith(UNICODE) or "\\" not in expression:
        return expression
    return regex_to_lark(expression, "dws")


def beyond_automata(expression: str) -> bool:
    """Whether it needs more than an automaton: look-around, or references to groups."""
    return any(
        found.group().startswith("(?") or found.group()[1] in "123456789k"
        for found in _BEYOND_AUTOMATA.finditer(expression)
    )


def any_of(texts: Collection[str]) -> str:
    """An expression, without anchors, for exactly these texts."""
    return "|".join(map(escaped, texts))


def escaped(text: str) -> str:
    """The text as an expression of Rust's regex crate."""
    return "".join(
        f"\\{each}"
        if each in r"\.+*?()|[]{}^$#&-~/"
        else each
        if each >= " "
        else f"\\x{{{ord(each):x}}}"
        for each in text
    )


def none_of(texts: Collection[str]) -> str | None:
    """An expression, without anchors, for all texts but these; None if it would be too large."""
    if sum(map(len, texts)) > _MOST_CHARACTERS or max(map(len, texts), default=0) > _LONGEST:
        return None
    return _none_of(frozenset(texts))


def _none_of(texts: frozenset[str]) -> str:
    tails: dict[str, set[str]] = {}
    for text in texts:
        if text:
            tails.setdefault(text[0], set()).add(text[1:])
    other = "".join(map(escaped, sorted(tails)))
    begun = [escaped(first) + _none_of(frozenset(rest)) for first, rest in sorted(tails.items())]
    more = "|".join([*begun, rf"[^{other}][\s\S]*" if other else r"[\s\S]+"])
    return f"(?:{more})" + ("" if "" in texts else "?")
