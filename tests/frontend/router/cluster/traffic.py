"""Requests to a cluster: one, a stream, a load that goes on."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import aiohttp

TEXT = "Where is the key? The key is under the mat, and the mat is at the door of the house. "


async def complete(session: aiohttp.ClientSession, url: str, prompt: str, **more: Any) -> Any:
    """The answer to a completion, or the error's text."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0} | more
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        return (
            answer["choices"][0]["text"]
            if response.status == 200
            else f"{response.status} {answer}"
        )


async def streamed(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str,
    begun: list[str] | None = None,
    **more: Any,
) -> str:
    """The last line of a long stream, or its error; no draft shortens it.

    Its prompt is put into `begun` at its first line.
    """
    body = {"prompt": prompt, "max_tokens": 400, "temperature": 2, "stream": True}
    body |= {"ignore_eos": True} | more
    last = ""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            if not last and begun is not None:
                begun.append(prompt)
            last = line.decode().strip() or last
            if '"error"' in last:
                break
    return last


async def report(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(f"{url}/cache/report") as response:
        return await response.json()


async def until(holds: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        result = holds()
        if await result if asyncio.iscoroutine(result) else result:
            return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


class Load:
    """Requests that go on until it is ended; each client has one at a time.

    Attributes:
        answers: what came, of a stream its last line.
        failures: what failed, with the number of its client.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        clients: int,
        *,
        stream: bool = False,
        **more: Any,
    ) -> None:
        self.answers: list[str] = []
        self.failures: list[tuple[int, str]] = []
        self._ends = False
        ask = streamed if stream else complete
        self._tasks = [
            asyncio.create_task(self._client(partial(ask, session, url, **more), number))
            for number in range(clients)
        ]

    async def _client(self, ask: Callable[[str], Awaitable[str]], number: int) -> None:
        turn = 0
        while not self._ends:
            turn += 1
            prompt = f"{TEXT * (number % 3 + 1)} {number} {turn % 5}"
            try:
                text = await ask(prompt)
            except aiohttp.ClientError as error:
                text = f"connection: {error!r}"
            if re.match(r"[45]\d\d |connection", text) or '"error"' in text:
                self.failures.append((number, text))
            else:
                self.answers.append(text)
            await asyncio.sleep(0.01)

    async def __aenter__(self) -> Load:
        return self

    async def __aexit__(self, failed: type[BaseException] | None, *_: object) -> None:
        for task in self._tasks if failed is not None else ():
            task.cancel()
        await self.end()

    async def more(self, count: int) -> None:
        """Waits for so many further answers."""
        goal = len(self.answers) + count
        await until(lambda: len(self.answers) >= goal)

    async def end(self) -> None:
        """Lets those that run end."""
        self._ends = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
