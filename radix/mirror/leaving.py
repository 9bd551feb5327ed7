"""Which pages of a tree other tiers should get: those that are evicted, and those hit again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from coppice.radix.mirror.names import NAME_BYTES, PageKey, Salt, chain, salted
from coppice.radix.node import Node, Root
from coppice.radix.state import TreeListener
from coppice.radix.tokens import TOKEN_BYTES


class NamedPage:
    """A page of the pool, and what other tiers call its content."""

    __slots__ = ("key", "name", "page")

    def __init__(self, key: PageKey, name: bytes, page: int) -> None:
        self.key = key
        self.name = name
        self.page = page


class Known:
    """Names of pages that other tiers have, as far as is remembered: the last `most` of them.

    A name that it has forgotten costs one needless copy, and no more. O(1) a call.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: dict[bytes, None] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: bytes) -> None:
        self._names.pop(name, None)
        self._names[name] = None
        if len(self._names) > self._most:
            del self._names[next(iter(self._names))]

    def discard(self, name: bytes) -> None:
        self._names.pop(name, None)

    def clear(self) -> None:
        self._names.clear()


class _Chain:
    """Names before the pages of one node: `names` holds that before page i at i * NAME_BYTES.

    `head`: tokens of the node's first page that lie above the node.
    """

    __slots__ = ("head", "names")

    def __init__(self, head: bytes, name: bytes) -> None:
        self.head = head
        self.names = bytearray(name)


class LeavingPages(TreeListener):
    """Collects the pages that leave a tree, with their names, before their content is overwritten.

    Drafts do not count: they are not known to be wanted. What `wanted` refuses is left out (a page
    that other tiers have already).

    The names of a node's pages are kept from its first eviction until it has left the tree, so that
    evicting it page by page costs as much as evicting it at once: O(its tokens).
    """

    def __init__(
        self,
        page_size: int,
        root: Callable[[Hashable], bytes | None],
        wanted: Callable[[bytes], bool],
        salt: Salt | None = None,
    ) -> None:
        """`root` gives the name with which the chain of a namespace begins, None for one to skip.

        It is called again whenever a name is missing: it should remember. `salt`: see `chain`; what
        has no name is skipped.
        """
        self._size = page_size
        self._root = root
        self._wanted, self._salt = wanted, salt
        self._chains: dict[Node, _Chain] = {}
        self._gone: list[NamedPage] = []

    def take(self) -> list[NamedPage]:
        """What has left since the last call; its pages may be overwritten after this."""
        gone, self._gone = self._gone, []
        return gone

    def pages(self, node: Node, begin: int = 0) -> Iterator[NamedPage]:
        """The pages of a node from the one with index `begin` on; none if they have no names."""
        names = self._names(node, len(node.pages))
        if names is None:
            return
        size, first = self._size, node.start // self._size
        for index in range(begin, min(len(node.pages), len(names.names) // NAME_BYTES)):
            border = (first + index) * size
            tokens = self._tokens(node, names, border, min(border + size, node.end))
            parent = bytes(names.names[index * NAME_BYTES : (index + 1) * NAME_BYTES])
            if self._salt is not None:
                if (salt := self._salt(tokens)) is None:
                    return
                parent = salted(parent, salt)
            key = PageKey(parent, tokens)
            yield NamedPage(key, key.name, node.pages[index])

    def split(self, upper: Node, lower: Node) -> None:
        self._chains.pop(lower, None)

    def evicted(self, node: Node, length: int) -> None:
        if not node.draft:
            size = self._size
            kept = -(-(node.start + length) // size) - node.start // size if length else 0
            self._gone += [each for each in self.pages(node, kept) if self._wanted(each.name)]
            if (names := self._chains.get(node)) is not None:
                del names.names[(kept + 1) * NAME_BYTES :]  # other tokens may follow
        if not length:
            self._chains.pop(node, None)

    def cleared(self) -> None:
        self._chains.clear()

    def _tokens(self, node: Node, names: _Chain, begin: int, end: int) -> bytes:
        """The tokens from one position to another, which begin in the node or its first page."""
        if begin >= node.start:
            return node.edge[(begin - node.start) * TOKEN_BYTES : (end - node.start) * TOKEN_BYTES]
        return names.head + node.edge[: (end - node.start) * TOKEN_BYTES]

    def _names(self, node: Node, count: int) -> _Chain | None:
        """The names before the first `count` pages of a node, as far as there are names.

        None if there are none.
        """
        size = self._size
        found = self._chains.get(node)
        if found is None:
            path = node.path()
            above = path[0]
            while above.parent is not None:
                above = above.parent
            assert isinstance(above, Root)
            name = self._root(above.namespace)
            if name is None:
                return None
            border = node.start // size * size * TOKEN_BYTES
            tokens = b"".join(each.edge[: each.length * TOKEN_BYTES] for each in path[:-1])
            if keys := chain(name, tokens[:border], size * TOKEN_BYTES, self._salt):
                name = keys[-1].name
            if len(keys) < border // (size * TOKEN_BYTES):
                return None
            found = self._chains[node] = _Chain(tokens[border:], name)
        have = len(found.names) // NAME_BYTES
        if have < count:
            border = (node.start // size + have - 1) * size
            end = (node.start // size + count - 1) * size
            tokens = self._tokens(node, found, border, end)
            parent = bytes(found.names[-NAME_BYTES:])
            for key in chain(parent, tokens, size * TOKEN_BYTES, self._salt):
                found.names += key.name
        return found
