"""Makes the report of a running server, at a limited cost to its engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from dataclasses import replace
from typing import Any, Protocol

from coppice.frontend.errors import RequestFailed
from coppice.frontend.report.encode import Names, server_report
from coppice.frontend.report.samples import SAMPLE_SECONDS, History, Sample
from coppice.frontend.report.words import token_text
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.report.snapshot import CacheReport, TreeReport

log = logging.getLogger(__name__)

FRESH_SECONDS = 1.0
"""A report that is no older than this is returned again."""

SHARE = 0.02
"""The share of the engine's time that reports of its tree may take."""


class Asks(Protocol):
    """An engine that can be asked, wherever it runs."""

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The result of the engine's public method of that name."""


class Reporter:
    """Samples the engine's counts, and makes the report for all readers, as JSON in bytes.

    All of it is at most a second old except its tree, for which the engine's steps wait. Reports
    show the same tree until 50 times the duration of finding it has passed.
    """

    def __init__(
        self,
        engine: Asks,
        tokenizer: Tokenizer,
        model: str,
        *,
        show_text: bool,
    ) -> None:
        """`show_text`: whether the report contains text of prompts."""
        self._engine = engine
        self._model = model
        decode = token_text(tokenizer) if show_text else None
        self.names = Names(decode)
        self._started = time.time()
        self._history = History()
        self._sampling: asyncio.Task[None] | None = None
        self._making = asyncio.Lock()
        self._tree: TreeReport | None = None
        self._tree_made = -float("inf")  # by the clock of the loop
        self._report = b""
        self._report_made = -float("inf")

    async def start(self) -> None:
        """Begins to sample, in the running event loop."""
        self._sampling = asyncio.create_task(self._sample())

    async def stop(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampling

    def forget(self) -> None:
        """Makes the next report anew, tree included, since pins or the cache were changed."""
        self._tree_made = self._report_made = -float("inf")

    async def report(self) -> bytes:
        """The report as JSON. Raises RequestFailed if the engine does not answer."""
        async with self._making:
            clock = asyncio.get_running_loop().time
            asked = clock()
            if asked - self._report_made < FRESH_SECONDS:
                return self._report
            due = self._tree is None or asked - self._tree_made >= self._tree.seconds / SHARE
            report: CacheReport = await self._engine.ask("cache_report", tree=due)
            if due:
                self._tree, self._tree_made = report.tree, asked
            else:
                report = replace(report, tree=self._tree)
            self._report = await asyncio.to_thread(self._encoded, report, time.time())
            self._report_made = asked
            return self._report

    def _encoded(self, report: CacheReport, at: float) -> bytes:
        encoded = server_report(
            report, self._history, self.names, model=self._model, at=at, started=self._started
        )
        return json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()

    async def _sample(self) -> None:
        while True:
            try:
                self._history.add(Sample(time.time(), await self._engine.ask("stats")))
            except RequestFailed:  # the engine is being restarted
                log.debug("no sample: the engine does not answer")
            except Exception:  # the next one may succeed
                log.exception("the engine could not be sampled")
            await asyncio.sleep(SAMPLE_SECONDS)
