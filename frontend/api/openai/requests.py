"""The requests of the OpenAI API: every parameter is followed, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, StringConstraints

from coppice.frontend.api.openai.response_formats import Formed, form_of
from coppice.frontend.api.request import TextRequest
from coppice.frontend.chat.messages import MessageBody
from coppice.frontend.chat.tools.choice import Tool, ToolChoice, tools_of
from coppice.frontend.errors import BadRequest, bad_value
from coppice.frontend.strict import Body, Only, between, must_be, read
from coppice.frontend.text.model.generation_config import NO_DEFAULTS, GenerationDefaults
from coppice.runtime.requests.beam_search_params import (
    MAX_PENALTY,
    SHARED_WITH_SAMPLING,
    BeamSearchParams,
)
from coppice.runtime.requests.sampling_params import (
    BOUNDS,
    MAX_BIAS,
    MAX_N,
    MAX_STOP_STRINGS,
    SamplingParams,
)

# Most alternatives per token that a client may ask for: the API's own limit for chats.
MAX_LOGPROBS = 20
# Of one request: each takes memory from its beginning on.
MOST_RESULTS = 131_072
_MOST = 2**31 - 1

TokenIds: TypeAlias = Annotated[
    list[Annotated[int, between(0, _MOST)]],
    Field(fail_fast=True),
    must_be("a list of token ids (0 or above)"),
]
_TokenId: TypeAlias = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]
_Prompt: TypeAlias = Annotated[
    str
    | Annotated[list[int], Field(min_length=1, fail_fast=True)]
    | Annotated[
        list[str | Annotated[list[int], Field(fail_fast=True)]], Field(min_length=1, fail_fast=True)
    ],
    must_be("a string, a list of token ids, or a list of either, and not be empty"),
]
_Bias: TypeAlias = Annotated[
    dict[_TokenId, Annotated[float, between(-MAX_BIAS, MAX_BIAS)]],
    must_be(f"an object from token ids to numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}"),
]
# Clients send false for none. The integer comes first, since 0 equals False.
_Logprobs: TypeAlias = Annotated[
    Annotated[
        Annotated[int, between(0, MAX_LOGPROBS)] | Literal[False],
        Field(union_mode="left_to_right"),
    ],
    must_be(f"an integer from 0 to {MAX_LOGPROBS}"),
]
Stop: TypeAlias = Annotated[
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)],
    must_be(f"a string or a list of at most {MAX_STOP_STRINGS} strings that are not empty"),
]
ThinkingBudget: TypeAlias = Annotated[int, between(*BOUNDS["thinking_token_budget"])]
_EarlyStopping: TypeAlias = Annotated[bool | Literal["never"], must_be('a boolean or "never"')]


def bounded(name: str) -> Any:
    """The metadata of a number with the bounds of that sampling parameter."""
    return between(*BOUNDS[name])


class StreamOptions(Body):
    """What a stream contains beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: every chunk has the counts so far
    include_obfuscation: Annotated[Any, Only(False)] = None


class TextBody(Formed):
    """The parameters that both endpoints have."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, bounded("n")] = 1
    temperature: Annotated[float, bounded("temperature")] | None = None
    top_p: Annotated[float, bounded("top_p")] | None = None
    seed: Annotated[int, bounded("seed")] | None = None
    max_tokens: Annotated[int, bounded("max_tokens")] | None = None
    stop: Stop | None = None
    presence_penalty: Annotated[float, bounded("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounded("frequency_penalty")] | None = None
    logit_bias: _Bias | None = None
    user: str | None = None  # accepted without effect

    # Extensions, most of them under vLLM's names.
    top_k: Annotated[int, bounded("top_k")] | None = None
    min_p: Annotated[float, bounded("min_p")] | None = None
    repetition_penalty: Annotated[float, bounded("repetition_penalty")] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    prompt_logprobs: Annotated[int, between(0, MAX_LOGPROBS)] | None = None
    prompt_logprobs_start: Annotated[int, bounded("prompt_logprobs_start")] | None = None
    min_tokens: Annotated[int, bounded("min_tokens")] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int = 0
    use_beam_search: bool = False
    beam_width: Annotated[int, between(1, MAX_N)] | None = None
    length_penalty: Annotated[float, between(-MAX_PENALTY, MAX_PENALTY)] | None = None
    early_stopping: _EarlyStopping | None = None


class CompletionBody(TextBody):
    """The body of /v1/completions."""

    prompt: _Prompt
    max_tokens: Annotated[int, between(0, _MOST)] | None = None  # 0: nothing but the echo
    best_of: Annotated[int, bounded("best_of")] | None = None
    echo: bool = False
    logprobs: _Logprobs | None = None
    suffix: Annotated[Any, Only()] = None


class TemplateFields(Body):
    """What a chat template gets beside the messages and tools."""

    chat_template: Annotated[str, Field(min_length=1)] | None = None  # if the server allows it
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    add_generation_prompt: bool | None = None  # true, unless the final message is continued
    continue_final_message: bool = False

    def template(self) -> dict[str, Any]:
        """Arguments of `Dialect.encode`. Raises BadRequest if they contradict each other."""
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "continue_final_message needs add_generation_prompt to be false",
                param="continue_final_message",
            )
        prompt = self.add_generation_prompt
        return {
            "add_generation_prompt": not self.continue_final_message if prompt is None else prompt,
            "continue_final_message": self.continue_final_message,
            "template_arguments": self.chat_template_kwargs or {},
            **self.given("chat_template", "reasoning_effort"),
        }


class PredictedPart(Body):
    """A piece of a prediction."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """A text that much of the answer is expected to be."""

    type: Literal["content"]
    content: Annotated[
        str | Annotated[list[PredictedPart], Field(fail_fast=True)],
        must_be('a string or a list of parts {"type": "text", "text": ...}'),
    ]

    @property
    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(TextBody, TemplateFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, bounded("max_tokens")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, between(0, MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    thinking_token_budget: ThinkingBudget | None = None  # vLLM's name
    thinking_budget: ThinkingBudget | None = None  # Qwen's name for the same
    prediction: Prediction | None = None

    # They name, tag or group requests; the answer does not depend on them.
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only("none")] = None
    functions: Annotated[Any, Only([])] = None
    modalities: Annotated[Any, Only(["text"])] = None
    moderation: Annotated[Any, Only()] = None
    # The cache finds every shared prefix by itself, and lives as long as the process.
    prompt_cache_options: Annotated[Any, Only({"mode": "implicit"})] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory")] = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    store: Annotated[Any, Only(False)] = None
    verbosity: Annotated[Any, Only("medium")] = None
    web_search_options: Annotated[Any, Only()] = None


# Fields that go into SamplingParams under their own name.
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "allowed_token_ids", "bad_words", "prompt_logprobs",
    "prompt_logprobs_start", "n", "seed",
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip

# Fields of a beam search, and those of sampling that it shares.
_BEAM = ("beam_width", "length_penalty", "early_stopping")
_SHARED_WITH_BEAM = {"n", *SHARED_WITH_SAMPLING}


def parse_completion(body: Any, defaults: GenerationDefaults = NO_DEFAULTS) -> TextRequest:
    """The body of /v1/completions, with `defaults` for what it does not set. Raises BadRequest."""
    asked = read(CompletionBody, body)
    values = _sampling(asked)
    if asked.logprobs is not None and asked.logprobs is not False:
        values["logprobs"] = asked.logprobs
    if (
        asked.best_of is not None and asked.best_of != asked.n
    ):  # with as many as n, all are returned
        if asked.stream:
            raise BadRequest(
                f"best_of needs stream to be false, since the best are known at the end; "
                f"got {asked.best_of}",
                param="best_of",
            )
        values["best_of"] = asked.best_of
    if asked.echo:
        _echo(asked, values)
    if asked.max_tokens == 0:
        if not asked.echo:
            raise BadRequest("max_tokens may be 0 only with echo", param="max_tokens")
        values |= {"max_tokens": 1, "min_tokens": 0}
    prompt = asked.prompt
    prompts = (prompt,) if isinstance(prompt, str) or isinstance(prompt[0], int) else tuple(prompt)
    results = len(prompts) * max(asked.n, asked.best_of or 1)
    if results > MOST_RESULTS:
        raise BadRequest(
            f"prompt times n (or best_of) must be at most {MOST_RESULTS:,} results, "
            f"got {results:,}",
            param="prompt",
        )
    more = {"echo": asked.echo, "nothing_new": asked.max_tokens == 0}
    return _request(asked, body, values, defaults, prompts=prompts, **more)


def _echo(asked: CompletionBody, values: dict[str, Any]) -> None:
    """Asks for logprobs of the echoed prompt, if the text has them."""
    if asked.use_beam_search:
        raise BadRequest("echo is not supported with use_beam_search", param="echo")
    if "logprobs" in values:
        if asked.prompt_logprobs_start:
            raise BadRequest(
                "prompt_logprobs_start is not supported with echo", param="prompt_logprobs_start"
            )
        values.setdefault("prompt_logprobs", values["logprobs"])


def parse_chat(body: Any, defaults: GenerationDefaults = NO_DEFAULTS) -> TextRequest:
    """The body of /v1/chat/completions; without max_tokens, an answer may fill the context.

    `defaults` hold for what it does not set.

    Raises BadRequest.
    """
    asked = read(ChatBody, body)
    values = {"max_tokens": None} | _sampling(asked)
    if asked.max_completion_tokens is not None:
        if asked.max_tokens is not None:
            raise BadRequest(
                "max_tokens and max_completion_tokens mean the same; give one of them",
                param="max_completion_tokens",
            )
        values["max_tokens"] = asked.max_completion_tokens
    budgets = asked.given("thinking_token_budget", "thinking_budget")
    if len(budgets) > 1:
        raise BadRequest(
            "thinking_token_budget and thinking_budget mean the same; give one of them",
            param="thinking_budget",
        )
    for name, budget in budgets.items():
        if asked.use_beam_search:
            raise BadRequest(f"{name} is not supported with use_beam_search", param=name)
        values["thinking_token_budget"] = budget
    if asked.prediction is not None:
        if asked.use_beam_search:
            raise BadRequest("prediction is not supported with use_beam_search", param="prediction")
        values["prediction"] = asked.prediction.text
    if asked.logprobs:
        values["logprobs"] = asked.top_logprobs or 0
    elif asked.top_logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    tools = tools_of(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    return _request(
        asked,
        body,
        values,
        defaults,
        messages=tuple(asked.messages),
        tools=tools,
        template=asked.template(),
        include_reasoning=asked.include_reasoning,
        text_field="messages",
    )


def _sampling(asked: TextBody) -> dict[str, Any]:
    values = asked.given(*_SAMPLING)
    if asked.logit_bias:
        values["logit_bias"] = {int(token): bias for token, bias in asked.logit_bias.items()}
    return values


def _request(
    asked: TextBody,
    body: Mapping[str, Any],
    values: dict[str, Any],
    defaults: GenerationDefaults,
    **more: Any,
) -> TextRequest:
    if asked.stream and asked.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs needs stream to be false", param="prompt_logprobs")
    if asked.stream_options is not None and not asked.stream:
        raise BadRequest("stream_options needs stream to be true", param="stream_options")
    options = asked.stream_options or StreamOptions()
    if options.continuous_usage_stats and not options.include_usage:
        raise BadRequest(
            "stream_options.continuous_usage_stats needs include_usage to be true",
            param="stream_options.continuous_usage_stats",
        )
    form = form_of(asked)
    if form is not None:
        values["structured_outputs"] = form.params
    try:
        params = SamplingParams(**defaults.fill(values))
        beam = _beam(asked, values)
    except BadRequest:
        raise
    except ValueError as error:
        raise bad_value(error, body) from error
    return TextRequest(
        model=asked.model,
        params=params,
        beam=beam,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
        stream=asked.stream,
        prompt_logprobs=asked.prompt_logprobs is not None,
        return_token_ids=asked.return_token_ids,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        form=form,
        **({"prompts": (), "messages": ()} | more),
    )


def _beam(asked: TextBody, sampling: Mapping[str, Any]) -> BeamSearchParams | None:
    """The parameters of a beam search, if one is asked for."""
    values = asked.given(*_BEAM)
    if not asked.use_beam_search:
        for name in values:
            raise BadRequest(f"{name} needs use_beam_search to be true", param=name)
        return None
    for name, value in sampling.items():
        if name not in _SHARED_WITH_BEAM:
            raise BadRequest(
                f"{name} is not supported with use_beam_search, got {value!r:.80}", param=name
            )
    if "beam_width" not in values:
        raise BadRequest("beam_width is required with use_beam_search", param="beam_width")
    if sampling.get("max_tokens", 16) is None:
        raise BadRequest("max_tokens is required with use_beam_search", param="max_tokens")
    return BeamSearchParams(**values, **({"n": 1, "best_so_far": asked.stream} | dict(sampling)))
