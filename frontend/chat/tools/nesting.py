"""How deep a place of a JSON text lies in its objects and lists."""

from __future__ import annotations


class Nesting:
    """Follows a JSON text character by character.

    Attributes:
        depth: objects and lists that are open.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._quoted = self._escaped = False

    def push(self, character: str) -> int:
        """How the next character changes the depth: 1, -1 or, as all inside strings, 0."""
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
            return 0
        if character == '"':
            self._quoted = True
            return 0
        change = 1 if character in "{[" else -1 if character in "}]" else 0
        self.depth += change
        return change
