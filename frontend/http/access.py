"""Who may use the server, and how much: keys, concurrent requests, requests a minute."""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from coppice.frontend.errors import BadRequest
from coppice.frontend.http.options import ApiKey

# Open without a key: whether the server is alive, the page that shows how to use it, and one that
# asks for the key itself.
OPEN_PATHS = frozenset(
    {"/", "/health", "/health/live", "/health/ready", "/-/healthz", "/ping", "/cache"}
)
OPEN_PREFIX = "/cache/page/"  # the files of that page
ADMIN_PREFIXES = ("/cache/", "/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
# What the limits of a key count: whatever the model or its tokenizer works for.
COUNTED_PREFIXES = ("/v1/", "/v2/", "/score", "/rerank", "/tokenize", "/detokenize")


@dataclass(slots=True)
class Guest:
    """A user of the server: the holder of a key, or everybody without one together."""

    name: str
    admin: bool
    tenant: str | None = None  # whose cache its requests share; None: everybody's
    running: int = 0
    allowance: float = 0.0  # requests that may begin now, as of `updated`
    updated: float = 0.0


class Access:
    """Admits requests, or refuses them with the status and the code that clients know.

    Args:
        keys: the known keys; without any, everybody is admitted as one guest.
        isolated: whether the requests of each key share a cache among themselves alone; reports,
            controls and metrics are then closed to keys that are not admins'.
        max_concurrent: most requests of one guest at a time; None: any number.
        per_minute: most requests of one guest a minute (a token bucket that holds one minute's).
    """

    def __init__(
        self,
        keys: Sequence[ApiKey],
        *,
        isolated: bool = False,
        max_concurrent: int | None = None,
        per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = [
            (key.digest, Guest(key.name, key.admin, key.name if isolated else None)) for key in keys
        ]
        self._anybody = Guest("", admin=not isolated)
        self._only_admins = isolated or any(key.admin for key in keys)
        self._max_concurrent = max_concurrent
        self._per_minute = per_minute
        self._clock = clock
        now = clock()
        for guest in (self._anybody, *(guest for _, guest in self._keys)):
            guest.allowance, guest.updated = float(per_minute or 0), now

    def guest(self, path: str, authorization: str | None) -> Guest:
        """Who asks for `path` with this Authorization header. Raises BadRequest (401, 403)."""
        if not self._keys or path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return self._anybody
        kind, _, secret = (authorization or "").partition(" ")
        # aiohttp keeps bytes that are no UTF-8 as surrogates.
        sent = secret.strip().encode(errors="surrogateescape")
        digest = hashlib.sha256(sent).digest()
        found = None
        for known, guest in self._keys:  # all of them: the time must not depend on the key
            if hmac.compare_digest(known, digest):
                found = guest
        if kind.lower() != "bearer" or found is None:
            wrong = "is not known here" if authorization else "is missing"
            raise BadRequest(
                f"the API key {wrong}: send the header `Authorization: Bearer KEY` "
                f"or `X-Api-Key: KEY`",
                code="invalid_api_key",
                status=401,
                kind="authentication_error",
            )
        if self._only_admins and path.startswith(ADMIN_PREFIXES) and not found.admin:
            raise BadRequest(
                f"{path} needs an admin key", code="forbidden", status=403, kind="permission_error"
            )
        return found

    @contextmanager
    def using(self, guest: Guest, path: str) -> Iterator[None]:
        """Counts a request while it runs. Raises BadRequest (429) if there are too many."""
        if not path.startswith(COUNTED_PREFIXES):
            yield
            return
        if self._max_concurrent is not None and guest.running >= self._max_concurrent:
            raise _too_many(
                f"{guest.running} requests of this key run already, of {self._max_concurrent} "
                f"that may run at once",
                1,
            )
        self._take(guest)
        guest.running += 1
        try:
            yield
        finally:
            guest.running -= 1

    def _take(self, guest: Guest) -> None:
        if self._per_minute is None:
            return
        now = self._clock()
        refilled = guest.allowance + (now - guest.updated) * self._per_minute / 60
        guest.allowance, guest.updated = min(refilled, float(self._per_minute)), now
        if guest.allowance < 1:
            seconds = math.ceil((1 - guest.allowance) * 60 / self._per_minute)
            raise _too_many(
                f"this key has begun the {self._per_minute} requests that it may begin in a minute",
                seconds,
            )
        guest.allowance -= 1


def _too_many(message: str, seconds: int) -> BadRequest:
    return BadRequest(
        f"{message}; try again in {seconds} s",
        code="rate_limit_exceeded",
        status=429,
        kind="rate_limit_error",
        retry_after=seconds,
    )
