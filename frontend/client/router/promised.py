"""Prompts that are on their way to replicas: what later requests will hit there."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from coppice.radix.tokens import TOKEN_BYTES, common_prefix

# Bytes by which prompts are found: those that share less have no hit worth knowing.
_KEY = 16 * TOKEN_BYTES


class Promised:
    """Prompts by the replica that computes them, until it reports them itself."""

    def __init__(self) -> None:
        self._prompts: dict[tuple[Hashable, bytes], dict[str, tuple[int, bytes]]] = {}

    def add(self, request: str, replica: int, prompt: bytes, namespace: Hashable) -> None:
        """Notes that a replica will hold a prompt, as int32 bytes."""
        self._prompts.setdefault((namespace, prompt[:_KEY]), {})[request] = replica, prompt

    def remove(self, request: str, prompt: bytes, namespace: Hashable) -> None:
        """Forgets it."""
        key = namespace, prompt[:_KEY]
        found = self._prompts.get(key)
        if found is not None:
            found.pop(request, None)
            if not found:
                del self._prompts[key]

    def hits(self, prompt: bytes, namespace: Hashable) -> Iterator[tuple[int, int]]:
        """Replicas, and how many tokens of a prompt each will hold. O(prompts that begin alike)."""
        for replica, other in self._prompts.get((namespace, prompt[:_KEY]), {}).values():
            yield replica, common_prefix(prompt, 0, other) // TOKEN_BYTES
