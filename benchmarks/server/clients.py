"""The clients of `load.py`: their prompts, their connection, and what they observe."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass, field

DOCUMENTS = 4
LEFT_EARLY = 0.01


@dataclass
class Tally:
    """What the clients observed: counts, errors, seconds to the first token and between pieces."""

    answers: int = 0
    left: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between two pieces of one stream


class Mix:
    """Prompts: a shared document and tokens of the request's own."""

    def __init__(self, vocabulary: int, shared: int, own: int, out: int) -> None:
        rng = random.Random(0)
        self._tokens = range(vocabulary // 8, vocabulary)  # no special tokens
        self._documents = [rng.choices(self._tokens, k=shared) for _ in range(DOCUMENTS)]
        self._written = [", ".join(map(str, document)) for document in self._documents]
        self._own = own
        self._out = out

    def length(self, rng: random.Random) -> int:
        """Tokens to generate. With a fixed number, requests that began together would end together
        and be prefilled in one step, over and over, which no server sees."""
        return rng.randint(max(1, self._out // 2), self._out + self._out // 2)

    def prompt(self, rng: random.Random) -> list[int]:
        return rng.choice(self._documents) + rng.choices(self._tokens, k=self._own)

    def prompt_json(self, rng: random.Random) -> str:
        """A prompt as JSON; the documents are encoded only once."""
        own = rng.choices(self._tokens, k=self._own)
        return f"[{rng.choice(self._written)}, {', '.join(map(str, own))}]"


class Connection(asyncio.Protocol):
    """Sends one request after another. A bare protocol, to leave the cores to the server."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._over: asyncio.Future[None] | None = None
        self.open = False

    def ask(self, raw: bytes, leaves: bool) -> asyncio.Future[None]:
        """Sends a request; the future is done at the end of the answer, an abort or an error."""
        self._begun, self._last, self._leaves = time.monotonic(), 0.0, leaves
        self._head, self._tail = b"", b""
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(raw)
        return self._over

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    def data_received(self, piece: bytes) -> None:
        now = time.monotonic()
        self._head = self._head or piece
        self._tail = (self._tail + piece)[-2000:]
        if b'"text"' in piece:
            (self._tally.gaps if self._last else self._tally.ttft).append(
                now - (self._last or self._begun)
            )
            self._last = now
            if self._leaves:
                self._tally.left += 1
                self._end()
                return
        if self._tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            used = re.search(rb'"completion_tokens":\s*(\d+)', self._tail)
            if b" 200 " in self._head[:20] and used is not None:
                self._tally.answers += 1
                self._tally.tokens += int(used.group(1))
                self._done()
            else:
                self._end(self._head + self._tail)
        elif b" 200 " not in self._head[:20]:
            self._end(self._head)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(repr(error).encode() + self._tail)

    def _end(self, error: bytes | None = None) -> None:
        self.open = False
        if error is not None and self._over is not None and not self._over.done():
            self._tally.errors.append(error.decode(errors="replace")[-300:])
        self._done()
        self._transport.close()

    def _done(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
        self._over = None


async def client(
    address: tuple[str, int], model: str, mix: Mix, end: float, rng: random.Random, tally: Tally
) -> None:
    """Sends requests until `end` (`time.monotonic`)."""
    loop = asyncio.get_running_loop()
    connection = Connection(tally)
    while time.monotonic() < end:
        body = {
            "model": model,
            "max_tokens": mix.length(rng),
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        raw = f'{json.dumps(body)[:-1]}, "prompt": {mix.prompt_json(rng)}}}'.encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        try:
            if not connection.open:
                connection = Connection(tally)
                await loop.create_connection(lambda: connection, *address)  # noqa: B023
        except OSError as error:
            tally.errors.append(repr(error))
        else:
            await connection.ask(head.encode() + raw, rng.random() < LEFT_EARLY)
    if connection.open:
        connection.close()
