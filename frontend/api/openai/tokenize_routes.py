"""/tokenize and /detokenize, with vLLM's names: text to tokens and back."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from coppice.frontend.api.openai.requests import TemplateFields
from coppice.frontend.api.openai.schemas import Text, Tokens
from coppice.frontend.api.served_model import ServedModel
from coppice.frontend.chat.dialect import Dialect
from coppice.frontend.chat.messages import MessageBody
from coppice.frontend.chat.tools.choice import Tool
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.errors import BadRequest, bad_value
from coppice.frontend.http.json_answers import CHARACTERS, JsonAnswers
from coppice.frontend.http.json_bodies import JsonBodies
from coppice.frontend.http.routes import Route, json_answer
from coppice.frontend.strict import Body, read
from coppice.frontend.text.threads import TokenizerThreads


class TokenizeBody(TemplateFields):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[MessageBody], Field(min_length=1, fail_fast=True)] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class TokenizeRoutes:
    """The routes, over the tokenizer of the engine's model.

    Args:
        engine: whose tokenizer it is.
        model: whose name requests may give.
        bodies: reads the requests.
        writer: writes the answers.
        threads: run the tokenizer.
        dialect: how the model writes.
    """

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        bodies: JsonBodies,
        writer: JsonAnswers,
        threads: TokenizerThreads,
        dialect: Dialect,
    ) -> None:
        self._engine = engine
        self._model = model
        self._bodies = bodies
        self._writer = writer
        self._threads = threads
        self._dialect = dialect

    def routes(self) -> list[Route]:
        """For `add_routes`."""
        tokens, text = Tokens.model_json_schema(), Text.model_json_schema()
        return [
            Route(
                "POST",
                "/tokenize",
                self._tokenize,
                "Turn a text or a conversation into tokens",
                json_answer(tokens),
                body=TokenizeBody.model_json_schema(),
            ),
            Route(
                "POST",
                "/detokenize",
                self._detokenize,
                "Turn tokens into text",
                json_answer(text),
                body=DetokenizeBody.model_json_schema(),
            ),
        ]

    async def _tokenize(self, request: web.Request) -> web.Response:
        body, asked = await self._bodies.read(request, partial(read, TokenizeBody))
        self._model.check(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise BadRequest("prompt or messages is required, not both", param="prompt")
        if asked.messages is None:
            for name in ("tools", "add_generation_prompt", "continue_final_message"):
                if body.get(name) is not None:
                    raise BadRequest(f"{name} needs messages", param=name)
        elif asked.add_special_tokens:
            name = "add_special_tokens"
            raise BadRequest(f"{name} must be false with messages: the template does", param=name)

        def work() -> tuple[list[int], list[str] | None]:
            ids = self._ids(asked, body)
            texts = self._engine.texts.token_texts
            return ids, [texts.text(token) for token in ids] if asked.return_token_strs else None

        try:
            size, long = len(await request.read()), asked.chat_template is not None
            ids, texts = await self._threads.run(work, size=size, long=long)
        except ValueError as error:
            raise bad_value(error, body) from error
        answer = {"count": len(ids), "max_model_len": self._engine.max_model_len, "tokens": ids}
        return await self._writer.write(lambda: answer | {"token_strs": texts}, 2 * len(ids))

    def _ids(self, asked: TokenizeBody, body: dict[str, Any]) -> list[int]:
        tokenizer = self._engine.tokenizer
        if asked.messages is not None:
            tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
            return self._dialect.encode(asked.messages, tools=tools, **asked.template())
        assert asked.prompt is not None
        plain = asked.add_special_tokens is False
        return (tokenizer.encode_more if plain else tokenizer.encode)(asked.prompt)

    async def _detokenize(self, request: web.Request) -> web.Response:
        _, asked = await self._bodies.read(request, partial(read, DetokenizeBody))
        self._model.check(asked.model)
        tokenizer = self._engine.tokenizer

        def work() -> str:
            vocabulary = tokenizer.vocabulary
            for place, token in enumerate(asked.tokens):
                if not 0 <= token < vocabulary:
                    field = f"tokens[{place}]"
                    raise BadRequest(
                        f"{field} must be from 0 to {vocabulary - 1}, got {token!r:.40}",
                        param=field,
                    )
            return tokenizer.decode(asked.tokens, skip_special_tokens=False)

        text = await self._threads.run(work, size=len(await request.read()))
        return await self._writer.write(lambda: {"prompt": text}, len(text) // CHARACTERS)
