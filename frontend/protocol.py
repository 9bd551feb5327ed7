"""The OpenAI API's requests, read strictly: every parameter is honoured or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, TypeAlias

from coppice.frontend.tokenizer import Message
from coppice.runtime.beam_search import SHARED_WITH_SAMPLING, BeamSearchParams
from coppice.runtime.sampling_params import SamplingParams

PromptInput: TypeAlias = str | list[int]


class BadRequest(ValueError):
    """What is wrong with a request, in the terms of the API's error object."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
        retry_after: int | None = None,
    ) -> None:
        """`retry_after`: seconds after which the same request may be accepted."""
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.body = error_body(message, kind=kind, param=param, code=code)


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The API's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request of either endpoint: `prompts` or `messages` is set, never both."""

    model: str
    prompts: tuple[PromptInput, ...]
    messages: tuple[Message, ...]
    params: SamplingParams
    beam: BeamSearchParams | None  # a beam search, of whose parameters `params` are the rest
    cache_salt: str | None
    priority: int
    stream: bool
    include_usage: bool


# Alternatives a token that a client may ask for; the API's own limit for chats.
MAX_LOGPROBS = 20

# Parameters of the API that are not supported yet, with the values that ask for nothing and are
# accepted therefore. A null is accepted for each of them.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "user": (),
    "verbosity": (),
    "web_search_options": (),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same(value: Any, accepted: Any) -> bool:
    """Equality that keeps true and 1 apart, but not 0 and 0.0."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    )


def _is_integers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_integer, value))


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_string, value))


def _is_count(value: Any) -> bool:
    return _is_integer(value) and 0 <= value <= MAX_LOGPROBS


def _is_bias(value: Any) -> bool:
    """A JSON object has string keys, so token ids come as those."""
    return isinstance(value, dict) and all(
        key.isascii()
        and key.isdigit()
        and key == (key.lstrip("0") or "0")
        and len(key) < 12
        and _is_number(number)
        for key, number in value.items()
    )


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


# Parameters that go into SamplingParams under their own name: the check of the type, its name.
_SAMPLING: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (_is_number, "a number"),
    "top_p": (_is_number, "a number"),
    "top_k": (_is_integer, "an integer"),
    "min_p": (_is_number, "a number"),
    "presence_penalty": (_is_number, "a number"),
    "frequency_penalty": (_is_number, "a number"),
    "repetition_penalty": (_is_number, "a number"),
    "logit_bias": (_is_bias, "an object from token ids to numbers"),
    "allowed_token_ids": (_is_integers, "a list of token ids"),
    "bad_words": (_is_strings, "a list of strings"),
    "prompt_logprobs": (_is_count, f"an integer from 0 to {MAX_LOGPROBS}"),
    "prompt_logprobs_start": (_is_integer, "an integer"),
    "n": (_is_integer, "an integer"),
    "seed": (_is_integer, "an integer"),
    "max_tokens": (_is_integer, "an integer"),
    "min_tokens": (_is_integer, "an integer"),
    "stop": (_is_stop, "a string or a list of strings"),
    "stop_token_ids": (_is_integers, "a list of token ids"),
    "ignore_eos": (_is_bool, "true or false"),
    "include_stop_str_in_output": (_is_bool, "true or false"),
    "skip_special_tokens": (_is_bool, "true or false"),
}

# Parameters of a beam search, and those of sampling that it shares.
_BEAM: dict[str, tuple[Callable[[Any], bool], str]] = {
    "beam_width": (_is_integer, "an integer"),
    "length_penalty": (_is_number, "a number"),
    "early_stopping": (lambda value: _is_bool(value) or value == "never", 'a boolean or "never"'),
}
_SHARED_WITH_BEAM = {"n", *SHARED_WITH_SAMPLING}

_COMMON = {"model", "stream", "stream_options", "cache_salt", "priority", "use_beam_search"}


def parse_completion(body: Any) -> CompletionRequest:
    """The body of /v1/completions. Raises BadRequest."""
    body = _fields(body, {"prompt", "logprobs", "best_of"})
    if "prompt" not in body:
        raise BadRequest("prompt is required", param="prompt")
    values = _sampling(body)
    if body.get("logprobs", False) is not False:
        what = f"an integer from 0 to {MAX_LOGPROBS}"
        values["logprobs"] = _typed(body, "logprobs", _is_count, what)
    best_of = _typed(body, "best_of", _is_integer, "an integer")
    if best_of is not None and best_of != values.get("n", 1):  # as many: there is no choice to make
        if body.get("stream"):
            raise BadRequest(
                f"best_of needs stream to be false, since the best are known at the end; "
                f"got {best_of}",
                param="best_of",
            )
        values["best_of"] = best_of
    return _request(body, values, prompts=_prompts(body["prompt"]))


def parse_chat(body: Any) -> CompletionRequest:
    """The body of /v1/chat/completions; without max_tokens an answer may fill the context.

    Raises BadRequest.
    """
    body = _fields(body, {"messages", "max_completion_tokens", "logprobs", "top_logprobs"})
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    if "max_completion_tokens" in body and "max_tokens" in body:
        raise BadRequest(
            "max_tokens and max_completion_tokens mean the same; give one of them",
            param="max_completion_tokens",
        )
    values = {"max_tokens": None} | _sampling(body)
    if "max_completion_tokens" in body:
        values |= _sampling({"max_tokens": body["max_completion_tokens"]})
    wanted = _typed(body, "logprobs", _is_bool, "true or false")
    top = _typed(body, "top_logprobs", _is_count, f"an integer from 0 to {MAX_LOGPROBS}") or 0
    if wanted:
        values["logprobs"] = top
    elif top:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return _request(body, values, messages=tuple(messages))


def _fields(body: Any, own: set[str]) -> dict[str, Any]:
    """The parameters that are set; refuses what is unknown or not supported."""
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    known = own | _COMMON | set(_SAMPLING) | set(_BEAM)
    for name, value in body.items():
        if name in known or value is None:
            continue
        if name == "logits_processors":
            raise BadRequest("logits_processors are functions: only from Python", param=name)
        if name not in _NOT_SUPPORTED:
            raise BadRequest(f"{name} is not a parameter of this endpoint", param=name)
        accepted = _NOT_SUPPORTED[name]
        if not any(_same(value, ok) for ok in accepted):
            only = f"; it may only be {' or '.join(map(repr, accepted))}" if accepted else ""
            raise BadRequest(f"{name} is not supported yet, got {shown(value)}{only}", param=name)
    return {name: value for name, value in body.items() if value is not None}


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, (good, what) in _SAMPLING.items():
        if name not in body:
            continue
        if not good(body[name]):
            raise BadRequest(f"{name} must be {what}, got {shown(body[name])}", param=name)
        values[name] = body[name]
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    return values


def _typed(body: Mapping[str, Any], name: str, good: Callable[[Any], bool], what: str) -> Any:
    if name in body and not good(body[name]):
        raise BadRequest(f"{name} must be {what}, got {shown(body[name])}", param=name)
    return body.get(name)


def _request(
    body: Mapping[str, Any],
    sampling: Mapping[str, Any],
    *,
    prompts: tuple[PromptInput, ...] = (),
    messages: tuple[Message, ...] = (),
) -> CompletionRequest:
    model = _typed(body, "model", _is_string, "a string")
    if model is None:
        raise BadRequest("model is required", param="model")
    stream = bool(_typed(body, "stream", _is_bool, "true or false"))
    if stream and "prompt_logprobs" in sampling:
        raise BadRequest("prompt_logprobs needs stream to be false", param="prompt_logprobs")
    try:
        params = SamplingParams(**sampling)
        beam = _beam(body, sampling)
    except BadRequest:
        raise
    except ValueError as error:
        raise bad_value(error, body) from error
    return CompletionRequest(
        model,
        prompts,
        messages,
        params,
        beam,
        _typed(body, "cache_salt", _is_string, "a string"),
        _typed(body, "priority", _is_integer, "an integer") or 0,
        stream,
        _include_usage(body, stream),
    )


def _beam(body: Mapping[str, Any], sampling: Mapping[str, Any]) -> BeamSearchParams | None:
    """The parameters of a beam search, if one is asked for."""
    values = {name: _typed(body, name, *_BEAM[name]) for name in _BEAM if name in body}
    if not _typed(body, "use_beam_search", _is_bool, "true or false"):
        for name in values:
            raise BadRequest(f"{name} needs use_beam_search to be true", param=name)
        return None
    for name, value in sampling.items():
        if name not in _SHARED_WITH_BEAM:
            raise BadRequest(
                f"{name} is not supported with use_beam_search, got {shown(value)}", param=name
            )
    if "beam_width" not in values:
        raise BadRequest("beam_width is required with use_beam_search", param="beam_width")
    if sampling.get("max_tokens", 16) is None:
        raise BadRequest("max_tokens is required with use_beam_search", param="max_tokens")
    best_so_far = bool(body.get("stream"))
    return BeamSearchParams(**values, **({"n": 1, "best_so_far": best_so_far} | dict(sampling)))


def bad_value(error: ValueError, body: Mapping[str, Any]) -> BadRequest:
    """A refusal by a deeper layer, whose message begins with the parameter's name."""
    first = str(error).split(" ", 1)[0].split("[", 1)[0].rstrip(":")
    return BadRequest(str(error), param=first if first in body else None)


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise BadRequest("stream_options needs stream to be true", param="stream_options")
    if not isinstance(options, Mapping):
        raise BadRequest(
            f"stream_options must be an object, got {shown(options)}", param="stream_options"
        )
    for name in options:
        if name != "include_usage":
            raise BadRequest(
                f"stream_options.{name} is not supported; only include_usage is",
                param=f"stream_options.{name}",
            )
    include = options.get("include_usage", False)
    if not isinstance(include, bool):
        raise BadRequest(
            f"stream_options.include_usage must be true or false, got {shown(include)}",
            param="stream_options.include_usage",
        )
    return include


def _prompts(prompt: Any) -> tuple[PromptInput, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if _is_integers(prompt):
            return (prompt,)
        if all(isinstance(item, str) or _is_integers(item) for item in prompt):
            return tuple(prompt)
    raise BadRequest(
        "prompt must be a string, a list of token ids, or a list of either, and not be empty",
        param="prompt",
    )
