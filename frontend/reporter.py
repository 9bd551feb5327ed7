"""Keeps the report of a running server: samples its engine, and asks it no more than due."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from typing import Any, Protocol

from coppice.frontend.cache_json import Names, report_json
from coppice.frontend.cache_words import token_text
from coppice.frontend.deltas import RequestFailed
from coppice.frontend.history import SAMPLE_SECONDS, History, Sample
from coppice.frontend.tokenizer import Tokenizer
from coppice.runtime.live_report import LiveReport

log = logging.getLogger(__name__)

FRESH_SECONDS = 1.0
"""A report so old is given again, however many ask."""

SHARE = 0.02
"""Of the engine's time that reports may take: walking a large tree stops its steps meanwhile."""


class Asks(Protocol):
    """An engine that can be asked, wherever it runs."""

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The result of the engine's public method of that name."""


class Reporter:
    """Makes the report for all who ask, as JSON in bytes.

    Counters, queue and latencies are fresh to a second. What takes a walk through the tree is made
    again once it is fresh no more and the engine has worked 50 times as long as the last one took.
    """

    def __init__(
        self,
        engine: Asks,
        tokenizer: Tokenizer,
        model: str,
        *,
        show_text: bool,
    ) -> None:
        """`show_text`: let the report contain text of prompts."""
        self._engine = engine
        self._model = model
        decode = token_text(tokenizer) if show_text else None
        self.names = Names(decode, secrets.token_bytes(16))
        self._started = time.time()
        self._history = History()
        self._sampling: asyncio.Task[None] | None = None
        self._making = asyncio.Lock()
        self._live: LiveReport | None = None
        self._live_made = -float("inf")  # by the clock of the loop
        self._report = b""
        self._report_made = -float("inf")

    async def start(self) -> None:
        """Begins to sample; in the event loop of all calls."""
        self._sampling = asyncio.create_task(self._sample())

    async def stop(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampling

    def forget(self) -> None:
        """The next report is made afresh: something was changed that must show."""
        self._live_made = self._report_made = -float("inf")

    async def report(self) -> bytes:
        """The report as JSON. Raises RequestFailed if there is no engine that answers."""
        async with self._making:
            clock = asyncio.get_running_loop().time
            if clock() - self._report_made < FRESH_SECONDS:
                return self._report
            live, seconds = self._live, clock() - self._live_made
            if live is None or seconds >= max(FRESH_SECONDS, live.seconds / SHARE):
                asked = clock()
                live = self._live = await self._engine.ask("live_report")
                self._live_made = asked
                stats = live.stats
            else:
                stats = await self._engine.ask("stats")
            made = clock()
            self._report = await asyncio.to_thread(self._encoded, live, Sample(time.time(), stats))
            self._report_made = made
            return self._report

    def _encoded(self, live: LiveReport, now: Sample) -> bytes:
        report = report_json(
            live, self._history, now, model=self._model, started=self._started, names=self.names
        )
        return json.dumps(report, separators=(",", ":"), allow_nan=False).encode()

    async def _sample(self) -> None:
        while True:
            try:
                self._history.add(Sample(time.time(), await self._engine.ask("stats")))
            except RequestFailed:  # while it is started again there is nothing to sample
                log.debug("no sample: the engine does not answer")
            await asyncio.sleep(SAMPLE_SECONDS)
