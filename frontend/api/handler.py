"""The way of a request for text to the engine, and of its answer back, for every API.

down   read and check the body     http/json_bodies, the API's requests
       make tokens of its prompts  prepare, in a thread
       submit them                 client/engine
up     one JSON object             the API's answers
       or a stream of events       event_stream
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from aiohttp import web

from coppice.frontend.api.answers import Answers, counts, without_text
from coppice.frontend.api.context import ContextExceeded
from coppice.frontend.api.event_stream import EventStream
from coppice.frontend.api.kept_prefixes import KeptPrefixes
from coppice.frontend.api.prepare import Prepared, prepare
from coppice.frontend.api.renaming import renamed
from coppice.frontend.api.request import TextRequest
from coppice.frontend.api.served_model import ServedModel
from coppice.frontend.chat.dialect import Dialect
from coppice.frontend.client.deltas import Deltas
from coppice.frontend.client.engine import EngineClient, packed_ids
from coppice.frontend.errors import BadRequest, bad_value
from coppice.frontend.http.json_answers import JsonAnswers
from coppice.frontend.http.json_bodies import JsonBodies
from coppice.frontend.http.middleware import NOTE
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.text.model.generation_config import GenerationDefaults
from coppice.frontend.text.threads import TokenizerThreads
from coppice.runtime.report.snapshot import Peek
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.request import BESIDE_PINS, PromptTooLong, QueueFull


class Parse(Protocol):
    """What an API makes of a client's body, with what it gets that it does not set."""

    def __call__(self, body: Any, defaults: GenerationDefaults) -> TextRequest: ...


IsLong: TypeAlias = Callable[[Any], bool]
"""Whether parsing a body takes long, though it is small."""

_BYTES_OF_TOKEN = 4  # of its text, usually

log = logging.getLogger(__name__)


class Submitted(NamedTuple):
    """A request that is in the engine's queue."""

    asked: TextRequest
    prepared: Prepared
    deltas: Deltas
    deadline: float | None  # of the event loop's clock
    adapter: LoRARequest | None


class Rendered(NamedTuple):
    """A request that is not run, and what each of its prompts would hit."""

    asked: TextRequest
    prepared: Prepared
    tenant: str | None  # whose cache it may share
    peeks: Sequence[Peek]


class TextHandler:
    """Answers requests for text from one engine.

    Args:
        engine: a started engine.
        model: whose name requests must ask for.
        bodies: reads the requests.
        writer: writes the answers.
        threads: run the tokenizer.
        options: of the server.
        check_open: raises EngineStopped once the server takes no more requests.

    Attributes:
        model: as given.
        writer: as given.
        kept: prefixes that clients ask to keep in the cache.
        texts: of the tokenizer's tokens.
        dialect: how the model writes reasoning and tool calls.
    """

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        bodies: JsonBodies,
        writer: JsonAnswers,
        threads: TokenizerThreads,
        options: ServerOptions,
        check_open: Callable[[], None],
    ) -> None:
        self.model = model
        self.writer = writer
        self.texts = engine.texts.token_texts
        self.dialect = Dialect.of(
            engine.tokenizer,
            options.tool_call_parser,
            options.reasoning_parser,
            trust_templates=options.trust_request_chat_template,
        )
        self.kept = KeptPrefixes(engine)
        self._engine = engine
        self._bodies = bodies
        self._threads = threads
        self._options = options
        self._check_open = check_open

    @property
    def caching(self) -> bool:
        """Whether the tokens of prompts that are computed stay in the cache."""
        return self._engine.caching

    async def submit(
        self, request: web.Request, parse: Parse, is_long: IsLong | None = None
    ) -> Submitted:
        """Brings a request from the client's bytes to the engine's queue.

        `is_long`, if given, says of a body whether parsing it takes long, though it is small.

        Raises BadRequest, EngineStopped, or TimeoutError if that takes longer than is allowed.
        """
        self._check_open()
        body, asked = await self._read(request, parse, is_long)
        note = request[NOTE]
        note.fields["stream"] = asked.stream
        if self._options.log_prompts:
            note.fields["prompt"] = body.get("messages") or asked.prompts
        limit = self._options.request_timeout
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        try:
            async with asyncio.timeout_at(deadline):
                prepared = await self._prepare(asked, request)
                if prepared.relaxed:
                    keywords = ", ".join(dict.fromkeys(prepared.relaxed))
                    note.headers["X-Coppice-Relaxed"] = note.fields["relaxed"] = keywords
                    log.warning("a text need not follow %s of its schema", keywords)
                adapter = self.model.adapter(asked.model)
                deltas = await self._queue(asked, prepared, note.tenant, adapter)
        except TimeoutError:
            raise self._too_late() from None
        except ValueError as error:
            raise _refusal(error, asked, body) from error
        except QueueFull as error:
            raise BadRequest(str(error), status=429, kind="rate_limit_error") from error
        return Submitted(asked, prepared, deltas, deadline, adapter)

    async def count(self, request: web.Request, parse: Parse, is_long: IsLong | None = None) -> int:
        """The tokens of the prompt of a request that is not run. Raises BadRequest."""
        body, asked = await self._read(request, parse, is_long)
        try:
            prepared = await self._prepare(asked, request)
        except ValueError as error:
            raise _refusal(error, asked, body) from error
        return sum(len(ids) for _, ids in prepared.prompts)

    async def render(self, request: web.Request, parse: Parse) -> Rendered:
        """The prompts of a request that is not run, and what each would hit. Raises BadRequest."""
        self._check_open()
        body, asked = await self._read(request, parse)
        params, tenant = asked.params, request[NOTE].tenant
        try:
            prepared = await self._prepare(asked, request)
            packed = [packed_ids(ids) for _, ids in prepared.prompts]
            peeks = await asyncio.gather(
                *(
                    self._engine.ask(
                        "peek",
                        ids,
                        cache_salt=asked.cache_salt,
                        tenant=tenant,
                        prompt_logprobs=params.prompt_logprobs,
                        prompt_logprobs_start=params.prompt_logprobs_start,
                        lora_request=self.model.adapter(asked.model),
                    )
                    for ids in packed
                )
            )
        except ValueError as error:
            raise _refusal(error, asked, body) from error
        return Rendered(asked, prepared, tenant, peeks)

    async def texts_of(self, prepared: Prepared) -> list[str]:
        """The prompts as text, special tokens included."""

        def work() -> list[str]:
            decode = partial(self._engine.tokenizer.decode, skip_special_tokens=False)
            return [decode(ids) if text is None else text for text, ids in prepared.prompts]

        size = _BYTES_OF_TOKEN * sum(len(ids) for _, ids in prepared.prompts)
        return await self._threads.run(work, size=size)

    async def answer(
        self, request: web.Request, submitted: Submitted, answers: Answers
    ) -> web.StreamResponse:
        """Answers what was submitted, whole or as a stream, as `answers` writes it.

        Raises RequestFailed or TimeoutError; ConnectionError if a stream's client has disconnected.
        """
        deltas, deadline = submitted.deltas, submitted.deadline
        async with deltas:
            try:
                async with asyncio.timeout_at(deadline):
                    await answers.begin()
            except TimeoutError:
                raise self._too_late() from None
            if submitted.asked.stream:
                return await EventStream(request, answers, deltas, self._too_late, self.writer).run(
                    deadline
                )
            try:
                async with asyncio.timeout_at(deadline):
                    outputs = await deltas.outputs()
                    await answers.finish()
            except TimeoutError:
                raise self._too_late() from None
        if submitted.asked.nothing_new:
            outputs = [without_text(output) for output in outputs]
        request[NOTE].fields |= counts(outputs).for_log()
        return await self.writer.write(partial(answers.whole, outputs), answers.values(outputs))

    async def _read(
        self, request: web.Request, parse: Parse, is_long: IsLong | None = None
    ) -> tuple[Any, TextRequest]:
        """The body, and the request in it. Raises BadRequest."""
        check = partial(parse, defaults=self._engine.defaults)
        body, asked = await self._bodies.read(request, check, is_long)
        self.model.check(asked.model)
        return body, asked

    async def _queue(
        self,
        asked: TextRequest,
        prepared: Prepared,
        tenant: str | None,
        adapter: LoRARequest | None,
    ) -> Deltas:
        """Hands the request to the engine; prefixes that are kept for others make room for it."""
        while True:
            try:
                return await self._engine.submit(
                    prepared.prompts,
                    prepared.params,
                    beam=prepared.beam,
                    cache_salt=asked.cache_salt,
                    tenant=tenant,
                    priority=asked.priority,
                    lora_request=adapter,
                    in_pieces=asked.stream,
                )
            except PromptTooLong as error:
                if error.limit != BESIDE_PINS or not await self.kept.give_way():
                    raise

    async def _prepare(self, asked: TextRequest, request: web.Request) -> Prepared:
        """What the engine is given."""
        engine = self._engine
        given = (asked, self.dialect, self.texts, engine.max_model_len, request[NOTE].tenant)
        if not asked.needs_tokenizer:
            return prepare(*given)  # so little work that another thread would cost more
        # The body as it was read: what was sent may be compressed.
        size = len(await request.read()) + asked.remembered_bytes
        return await self._threads.run(prepare, *given, size=size, long=asked.is_long_work)

    def _too_late(self) -> TimeoutError:
        limit = self._options.request_timeout
        return TimeoutError(f"the request took longer than request_timeout, {limit:g} s")


def _refusal(error: ValueError, asked: TextRequest, body: Mapping[str, Any]) -> BadRequest:
    """The error of the tokenizer or the engine in the words of the client's API."""
    if isinstance(error, PromptTooLong):
        return ContextExceeded(error, asked.text_field)
    return renamed(bad_value(error, body), asked.names)
