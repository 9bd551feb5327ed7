"""Which servers a shared_cache may name, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qsl, urlsplit

_FORMS = (
    "redis://[user:password@]host[:port][/db], rediss:// likewise, with TLS, or "
    "unix://[user:password@]/path[?db=number]"
)
_TLS = ("ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile")
#: What may stand after the question mark.
_OPTIONS = {"redis": ("db",), "rediss": ("db", *_TLS), "unix": ("db", "password")}


def without_password(url: str) -> str:
    """The URL as it may be shown: without user and password."""
    scheme, mark, rest = url.partition("://")
    if "@" in rest:
        rest = "***@" + rest.rpartition("@")[2]
    parts = (scheme + mark + rest).split("&")
    return "&".join(_hidden(part) for part in parts)


def _hidden(part: str) -> str:
    """A part of a query, without the value of a password."""
    before, name, _ = part.partition("password=")
    return f"{before}{name}***" if name else part


def check_address(url: object) -> str:
    """Returns the URL as it may be shown.

    Raises ValueError, naming `shared_cache`, the value without its password and what is allowed,
    for what is not the URL of a Redis or Valkey server.
    """
    if not isinstance(url, str):
        raise ValueError(f"shared_cache must be {_FORMS}, got {url!r}")
    shown = without_password(url)
    for fault in _faults(url):
        raise ValueError(f"shared_cache must be {_FORMS}, got {shown!r}: {fault}")
    return shown


def _faults(url: str) -> Iterator[str]:
    """What is wrong with a URL, as far as the first thing."""
    if "#" in url:
        yield "a # in a password is written %23"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # Its message may quote the password.
        yield "the port must be a number" if "ort" in str(error) else "it is malformed"
        return
    if parts.scheme not in _OPTIONS or not url.startswith(f"{parts.scheme}://"):
        yield "it begins otherwise"
    elif parts.scheme == "unix":
        if len(parts.path) < 2:
            yield "it names no socket"
        if parts.hostname:
            yield "a socket's path begins with /, as in unix:///run/redis.sock"
    else:
        if not parts.hostname:
            yield "it names no host"
        if port == 0:
            yield "the port must be 1 .. 65535"
        if parts.path not in ("", "/") and not _is_number(parts.path[1:]):
            yield "a database is a number"
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _OPTIONS.get(parts.scheme, ()):
            yield f"{name} is not an option here"
        if name == "db" and not _is_number(value):
            yield "a database is a number"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
