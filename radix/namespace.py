"""Namespaces: what must be equal, beside the tokens, for two prompts to share KV."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class Namespace(NamedTuple):
    """A structured key: two are equal only if each of their fields is.

    Attributes:
        model: identity of the weights that compute the KV.
        adapter: identity of an adapter on top of them, or None.
        cache_salt: string that a request sends to share KV only with those that send the same, or
            None.
        tenant: name of the tenant, on a server whose tenants share no KV, or None.
    """

    model: str = ""
    adapter: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None


def encode_namespace(namespace: Hashable) -> bytes:
    """The bytes of a namespace in hashes, equal in every process; None gives b"".

    Each field is encoded with its length, and None apart from the empty string, so different
    namespaces have different bytes. Raises ValueError for keys other than `Namespace` and None, and
    for fields that are not strings: the tree takes any hashable key, but these have no encoding
    that is the same in every process.
    """
    if namespace is None:
        return b""
    if not isinstance(namespace, Namespace):
        raise ValueError(
            f"namespace must be a Namespace or None to be hashed the same everywhere, "
            f"got {namespace!r}"
        )
    encoded = b""
    for name, field in namespace._asdict().items():
        if field is not None and not isinstance(field, str):
            raise ValueError(f"namespace: {name} must be a string or None, got {field!r}")
        content = b"" if field is None else field.encode(errors="surrogatepass")
        length = -1 if field is None else len(content)
        encoded += length.to_bytes(8, "little", signed=True) + content
    return encoded
