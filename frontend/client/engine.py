"""The engine in its own process, for coroutines: submit requests, read their text, ask questions.

event loop   submit -> channel -> | engine's process: calls, step, step, ...
Deltas <- event loop <- reader <- | outputs of each step
           (a thread: tokens to text, stop strings; most text waits for a round, see pacing.py)
calls  <- event loop <- reader <- | answers, in a pipe and with a thread of their own
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeAlias

from coppice.frontend.client.deltas import Deltas
from coppice.frontend.client.lifecycle import EngineLifecycle, Launched, Link
from coppice.frontend.client.pacing import Rounds
from coppice.frontend.client.sendable import check_sendable
from coppice.frontend.errors import EngineStopped, RequestFailed
from coppice.frontend.text.model.generation_config import NO_DEFAULTS, GenerationDefaults
from coppice.frontend.text.outputs import TextDelta
from coppice.frontend.text.params import for_engine
from coppice.frontend.text.streams import Texts
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.process.messages import Lost, is_short, step_output
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.requests.pooling_recipe import Recipe
from coppice.runtime.requests.request import StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams

log = logging.getLogger(__name__)

AT_ONCE = 64  # results of one request that are prepared before others may run

Item: TypeAlias = tuple[str, TextDelta | RequestFailed]
"""A request's name, and its next piece of text or its failure."""


class EngineClient(EngineLifecycle):
    """Starts an engine, lets coroutines of one event loop use it, and replaces it if it dies.

    Args:
        launch, gives_way, timeout: as in `EngineLifecycle`.
        tokenizer: of the model.
        defaults: the sampling parameters of requests that do not set them.
        longest_delay: most seconds that a token waits, so that several leave together; 0: none.

    Attributes:
        tokenizer, defaults: as given.
        texts: what the running requests have generated so far.
    """

    def __init__(
        self,
        launch: Callable[[], Launched],
        tokenizer: Tokenizer,
        defaults: GenerationDefaults = NO_DEFAULTS,
        *,
        longest_delay: float = 0.0,
        gives_way: bool = False,
        timeout: float | None = None,
    ) -> None:
        super().__init__(launch, gives_way=gives_way, timeout=timeout)
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.texts = Texts(tokenizer)
        self._longest_delay = longest_delay
        self._names = count()
        self._numbers = count()
        self._running: dict[str, Deltas] = {}
        self._pooled: dict[str, asyncio.Future[StepOutput]] = {}  # vectors and scores to come
        self._answers: dict[int, asyncio.Future[Any]] = {}

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and output together, that the model takes."""
        assert self.ready is not None, "the engine was never started"
        return self.ready.max_model_len

    @property
    def recipe(self) -> Recipe:
        """What the checkpoint is made for beside text."""
        assert self.ready is not None, "the engine was never started"
        return self.ready.recipe

    @property
    def caching(self) -> bool:
        """Whether computed prompts stay in the cache."""
        assert self.ready is not None, "the engine was never started"
        return self.ready.caching

    @property
    def model_impl(self) -> str:
        """Whose code computes the model: ``coppice`` or ``transformers``."""
        assert self.ready is not None, "the engine was never started"
        return self.ready.model_impl

    @property
    def running(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._running) + len(self._pooled)

    async def submit(
        self,
        prompts: Sequence[tuple[str | None, Sequence[int]]],
        params: SamplingParams,
        *,
        beam: BeamSearchParams | None = None,
        cache_salt: str | None = None,
        tenant: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        in_pieces: bool = True,
    ) -> Deltas:
        """Queues a request for each prompt (its text, if there is one, and token ids).

        Arguments are those of `Engine.add_request`, or of `Engine.add_beam_search` with `beam`.
        Unless the text is wanted `in_pieces`, there is one delta for each prompt, with the whole.

        Raises:
            ValueError, QueueFull: the engine refuses one of them; then none runs. ValueError also
                for `logits_processors` that can't be sent to it.
            EngineStopped: there is no engine at present.
        """
        check_sendable((params if beam is None else beam).logits_processors or ())
        names = [f"request-{next(self._names)}" for _ in prompts]
        deltas = Deltas(names, self._abandon)
        given: SamplingParams | BeamSearchParams
        if beam is None:
            method, given = "add_request", for_engine(params, self.tokenizer)
        else:
            method, given = "add_beam_search", for_engine(beam, self.tokenizer)
        more: dict[str, Any] = {"cache_salt": cache_salt, "tenant": tenant, "priority": priority}
        if lora_request is not None:
            more["lora_request"] = lora_request
        try:
            packed = [packed_ids(ids) for _, ids in prompts]
            answers = []
            begun = 0  # results that will be
            for name, (text, ids), tokens in zip(names, prompts, packed, strict=True):
                self._running[name] = deltas
                self.texts.add(name, text, ids, params, in_pieces=in_pieces)
                answers.append(self._call(method, name, tokens, given, **more))
                begun += params.num_sequences
                if begun >= AT_ONCE:
                    begun = 0
                    await asyncio.sleep(0)  # there may be 100,000 prompts
            if len(answers) == 1:
                await answers[0]
            else:
                for refusal in await asyncio.gather(*answers, return_exceptions=True):
                    if refusal is not None:
                        raise refusal
        except BaseException:  # refused, or cancelled during a step
            deltas.close()
            raise
        return deltas

    async def pool(
        self,
        prompts: Sequence[Sequence[int]],
        params: PoolingParams,
        *,
        cache_salt: str | None = None,
        tenant: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> list[StepOutput]:
        """The vector or score of each prompt (token ids), in their order; see `StepOutput.pooled`.

        Arguments are those of `Engine.add_pooling`. A call that is cancelled aborts what still
        runs.

        Raises:
            ValueError, QueueFull: the engine refuses one of them; then none runs on.
            RequestFailed: a step failed; EngineStopped: there is no engine at present.
        """
        names = [f"pool-{next(self._names)}" for _ in prompts]
        more: dict[str, Any] = {"cache_salt": cache_salt, "tenant": tenant, "priority": priority}
        if lora_request is not None:
            more["lora_request"] = lora_request
        loop = asyncio.get_running_loop()
        try:
            answers = []
            for name, ids in zip(names, prompts, strict=True):
                tokens = packed_ids(ids)
                answers.append(self._call("add_pooling", name, tokens, params, **more))
                self._pooled[name] = loop.create_future()
                if len(answers) % AT_ONCE == 0:
                    await asyncio.sleep(0)  # there may be 100,000 prompts
            for refusal in await asyncio.gather(*answers, return_exceptions=True):
                if refusal is not None:
                    raise refusal
            found = await asyncio.gather(
                *(self._pooled[name] for name in names), return_exceptions=True
            )
            for each in found:
                if isinstance(each, BaseException):
                    raise each
            return [each for each in found if isinstance(each, StepOutput)]
        finally:
            for name in names:
                waits = self._pooled.pop(name, None)
                if waits is not None and not waits.done():
                    waits.cancel()
                    if self._channel is not None:
                        self._channel.send((None, "abort", (name,), {}))

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Makes one of the calls that `EngineService` lists, between two steps of the engine.

        Arguments and results are plain data that can be pickled.

        Raises:
            ValueError: there is no such call.
            EngineStopped: there is no engine at present; and what the method raises.
        """
        return await self._call(method, *args, **kwargs)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        trouble = self.trouble
        if trouble is not None or self._channel is None or self._loop is None:
            raise EngineStopped(f"the engine takes no requests now: {trouble}")
        number = next(self._numbers)
        answer = self._answers[number] = self._loop.create_future()
        answer.add_done_callback(lambda _: self._answers.pop(number, None))
        self._channel.send((number, method, args, kwargs))
        return answer

    def _abandon(self, name: str) -> None:
        """Forgets a request, and aborts it if it still runs."""
        self._running.pop(name, None)
        if self.texts.drop(name) and self._channel is not None:
            self._channel.send((None, "abort", (name,), {}))

    # -- what the engine sends, in the event loop ------------------------------------------------

    def _take_answer(self, number: int, failed: bool, result: Any) -> None:
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return
        if failed:
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def _fail_answers(self, reason: str) -> None:
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(EngineStopped(reason))

    def _fail_all(self, reason: str) -> None:
        self._fail_answers(reason)
        for name, deltas in list(self._running.items()):
            self.texts.drop(name)
            deltas.put(EngineStopped(reason))
        self._running.clear()
        for waits in self._pooled.values():
            if not waits.done():
                waits.set_exception(EngineStopped(reason))

    def _fail(self, name: str, reason: str) -> None:
        """Fails one request whose engine has ended, while others go on."""
        self.texts.drop(name)
        deltas = self._running.pop(name, None)
        if deltas is not None:
            deltas.put(EngineStopped(reason))
        waits = self._pooled.get(name)
        if waits is not None and not waits.done():
            waits.set_exception(EngineStopped(reason))

    def _take_pooled(self, output: StepOutput) -> None:
        waits = self._pooled.get(output.request_id)
        if waits is None or waits.done():
            return
        if output.pooled is None:
            waits.set_exception(RequestFailed(str(output.error)))
        else:
            waits.set_result(output)

    def _deliver(self, items: Sequence[Item]) -> None:
        for name, item in items:
            deltas = self._running.get(name)
            if deltas is not None:  # it was not abandoned
                deltas.put(item)

    def _deliver_round(self, items: Sequence[Item], rounds: Rounds, cost: float) -> None:
        """Delivers a round that has cost `cost` seconds of processor time so far."""
        begun = time.thread_time()

        def end() -> None:
            rounds.end(cost + time.thread_time() - begun)

        try:
            self._deliver(items)
        finally:
            # After the tasks that this has woken, which write to the clients.
            asyncio.get_running_loop().call_soon(end)

    # -- in the reader's thread ------------------------------------------------------------------

    def _read(self, channel: Link) -> None:
        rounds = Rounds(self._longest_delay)
        try:
            while True:
                left = rounds.left()
                if left is None or channel.wait(left):
                    for item in channel.receive():
                        if isinstance(item, list):
                            self._advance(item, rounds, channel)
                        elif isinstance(item, Lost):
                            self._take_lost(item, channel)
                        else:
                            self._in_loop(self._take_state, item)
                if rounds.due:
                    self._send_round(rounds, channel)
        except EOFError:
            self._send_round(rounds, channel)  # what it generated before it died

    def _advance(self, rows: Sequence[tuple[Any, ...]], rounds: Rounds, channel: Link) -> None:
        """Makes text of what cannot wait for a round."""
        items: list[Item] = []
        patient = self._longest_delay > 0
        for row in rows:
            if is_short(row) and self.texts.keep(*row[:5], patient=patient):
                continue
            output = step_output(row)
            name = output.request_id
            if name in self._pooled:
                self._in_loop(self._take_pooled, output)
                continue
            try:
                delta, stopped = self.texts.advance(output, patient=patient)
            except Exception as error:  # the others must not fail with it
                items.append((name, self._no_text(name, error, channel)))
                continue
            if stopped:
                channel.send((None, "abort", (name, output.index), {}))
            if delta is not None:
                items.append((name, delta))
        if items:
            self._in_loop(self._deliver, items)
        if self.texts.waiting:
            rounds.came()

    def _take_lost(self, lost: Lost, channel: Link) -> None:
        """Has a request run again of which nothing was shown; fails the others."""
        name = lost.request_id
        again = lost.may_run_again and self.texts.again(name)
        channel.send((None, "again" if again else "abort", (name,), {}))
        if not again:
            self._in_loop(self._fail, name, lost.reason)

    def _send_round(self, rounds: Rounds, channel: Link) -> None:
        rounds.begin()
        begun = time.thread_time()
        items: list[Item] = []
        for name, index in self.texts.waiting:
            try:
                delta = self.texts.release(name, index)
            except Exception as error:
                items.append((name, self._no_text(name, error, channel)))
                continue
            if delta is not None:
                items.append((name, delta))
        self._in_loop(self._deliver_round, items, rounds, time.thread_time() - begun)

    def _no_text(self, name: str, error: Exception, channel: Link) -> RequestFailed:
        log.error("the text of %s could not be made", name, exc_info=error)
        channel.send((None, "abort", (name,), {}))
        return RequestFailed(f"no text: {type(error).__name__}: {error}")


def packed_ids(token_ids: Sequence[int]) -> array[int]:
    """Token ids as they travel. Raises ValueError for those that no vocabulary can have."""
    try:
        return array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"prompt token ids must be integers of a vocabulary: {error}") from error
