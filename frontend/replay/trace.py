"""Reads traces of requests: Mooncake's format, and plain JSON lines of token lists or texts.

A trace is read twice. `read_trace` checks every line and adds up the sizes, so that nothing of a
malformed file is replayed; `Trace.requests` then makes the tokens, one request at a time.
"""

from __future__ import annotations

import codecs
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import numpy as np

from coppice.runtime.offline.replay import ReplayRequest

FORMATS = ("auto", "mooncake", "jsonl")
BLOCK_TOKENS = 512
"""Tokens that each hash id of Mooncake's format stands for."""

MAX_TOKEN = 2**31 - 1
_MAX_REPORTED = 10  # malformed lines that an error names
_LATEST = 1e15  # upper bound of timestamps, exclusive

Encode = Callable[[str, bool], list[int]]
"""Text to token ids; with True the special tokens with which a prompt begins are added."""

# Other keys of Mooncake-style traces: none of them changes which prefixes are shared.
_MOONCAKE_KEYS = {"timestamp", "input_length", "output_length", "hash_ids"}
_MOONCAKE_EXTRA = {"chat_id", "parent_chat_id", "priority", "request_id", "session_id", "turn",
                   "type", "user_id"}  # fmt: skip
_PROMPTS = ("prompt", "prompt_token_ids")
_OUTPUTS = ("output", "output_token_ids", "output_tokens")
_NAMESPACES = ("namespace", "cache_salt")
_JSONL_KEYS = {*_PROMPTS, *_OUTPUTS, *_NAMESPACES, "timestamp"}


class MalformedTrace(ValueError):
    """Lines of a trace are malformed; the message names the first ten by their numbers."""


@dataclass(frozen=True, slots=True)
class _Record:
    """One line, checked but not expanded."""

    prompt: array[int] | tuple[list[int], int]  # tokens, or hash ids and their length in tokens
    output: array[int] | int  # tokens, or their number, of tokens that no other request has
    namespace: str | None
    seconds: float | None

    @property
    def prompt_tokens(self) -> int:
        return self.prompt[1] if isinstance(self.prompt, tuple) else len(self.prompt)

    @property
    def output_tokens(self) -> int:
        return self.output if isinstance(self.output, int) else len(self.output)


@dataclass(frozen=True, slots=True)
class Trace:
    """A file whose first `count` requests are well-formed, and their sizes in tokens."""

    path: Path
    format: str  # "mooncake" or "jsonl"
    count: int
    prompt_tokens: int
    output_tokens: int
    longest: int  # tokens of the longest request, output included
    longest_line: int
    start: float | None  # seconds of the first request; None: the trace has no times
    encode: Encode | None

    def requests(self) -> Iterator[ReplayRequest]:
        """The requests with their tokens, made one at a time. O(tokens of the request) each.

        Times start at 0; if the trace has none, each request comes a second after the last.
        Raises MalformedTrace if the file has changed since it was checked.
        """
        records = _records(self.path, _PARSERS[self.format], self.encode)
        number = -1
        for number, (line, record) in enumerate(islice(records, self.count)):
            if isinstance(record, str):
                raise MalformedTrace(f"{self.path}:{line}: {record}; it has changed while read")
            seconds = number if self.start is None else (record.seconds or 0.0) - self.start
            prompt = record.prompt
            if isinstance(prompt, tuple):
                prompt = _expand(prompt[0], prompt[1])
            output = record.output
            if isinstance(output, int):
                output = _fresh(number, output)
            yield ReplayRequest(prompt, output, record.namespace, float(seconds))
        if number + 1 < self.count:
            raise MalformedTrace(
                f"{self.path}: it had {self.count:,} requests when it was checked, and has "
                f"{number + 1:,} now; it has changed while read"
            )


def read_trace(
    path: Path,
    *,
    format: str = "auto",
    encode: Encode | None = None,
    limit: int | None = None,
) -> Trace:
    """Checks a trace, or its first `limit` requests. O(size of the file), in memory for a line.

    Args:
        path: the file; empty lines are skipped.
        format: one of `FORMATS`; "auto" takes Mooncake's if the first line has `hash_ids`.
        encode: a tokenizer's, for traces with texts.
        limit: the most requests that are read.

    Raises:
        MalformedTrace: at least one line is malformed.
        ValueError: the file can't be read, or not twice, or has no request, or an argument is out
            of range.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(
                f"trace {str(path)!r} must be a file, since it is read twice; write the output of "
                f"a pipe to a file first"
            )
        if format == "auto":
            format = _detect(path)
        return _check(path, format, encode, limit)
    except OSError as error:
        raise ValueError(f"trace {str(path)!r} cannot be read: {error.strerror}") from error


def _check(path: Path, format: str, encode: Encode | None, limit: int | None) -> Trace:
    wrong: list[str] = []
    count = malformed = prompts = outputs = longest = longest_line = 0
    start: float | None = None
    last: float | None = None
    for line, record in islice(_records(path, _PARSERS[format], encode), limit):
        if isinstance(record, _Record):
            problem = _time_problem(record.seconds, last, first=not count)
            if not count:
                start = record.seconds
            last = record.seconds
            count += 1
            prompts += record.prompt_tokens
            outputs += record.output_tokens
            if (tokens := record.prompt_tokens + record.output_tokens) > longest:
                longest, longest_line = tokens, line
        else:
            problem = record
        if problem is not None:
            malformed += 1
            if len(wrong) < _MAX_REPORTED:
                wrong.append(f"{path}:{line}: {problem}")
    if malformed:
        if malformed > len(wrong):
            wrong.append(f"and {malformed - len(wrong):,} more")
        what = "a malformed line" if malformed == 1 else f"{malformed:,} malformed lines"
        raise MalformedTrace("\n  ".join([f"the trace has {what}; nothing was replayed", *wrong]))
    if not count:
        raise ValueError(f"trace {str(path)!r} has no requests")
    return Trace(path, format, count, prompts, outputs, longest, longest_line, start, encode)


def _time_problem(seconds: float | None, last: float | None, *, first: bool) -> str | None:
    if first:
        return None
    if (seconds is None) != (last is None):
        return "timestamp: all requests must have one, or none"
    if seconds is not None and last is not None and seconds < last:
        return f"timestamp: {seconds:g} s comes after {last:g} s; requests must be in order of time"
    return None


def _detect(path: Path) -> str:
    first = next((line for _, line in _lines(path)), b"")
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return "jsonl"  # whose reader reports what is wrong with it
    return "mooncake" if isinstance(value, dict) and "hash_ids" in value else "jsonl"


# -- lines -------------------------------------------------------------------------------------


def _records(
    path: Path, parse: Callable[[Any, Encode | None], _Record], encode: Encode | None
) -> Iterator[tuple[int, _Record | str]]:
    """Each line that is not empty, by its number: a record, or what is wrong with it."""
    for number, line in _lines(path):
        try:
            yield number, parse(_json(line), encode)
        except _Wrong as error:
            yield number, str(error)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, by their numbers, without a byte order mark at the start."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line


class _Wrong(Exception):
    """What is wrong with a line."""


def _json(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8").strip(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise _Wrong(f"not UTF-8: {error.reason} at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise _Wrong(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise _Wrong(f"not JSON that can be read: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Wrong(f"{shown(twice)} is there twice")
    return made


def _mooncake(value: Any, encode: Encode | None) -> _Record:
    """A line of Mooncake's format (Qin et al., "Mooncake", FAST 2025)."""
    if not isinstance(value, dict):
        raise _Wrong(f"an object is needed, with hash_ids, got {shown(value)}")
    _known_keys(value, _MOONCAKE_KEYS | _MOONCAKE_EXTRA, "mooncake")
    for name in ("input_length", "output_length", "hash_ids"):
        if name not in value:
            raise _Wrong(f"{name} is missing")
    length = _count("input_length", value["input_length"], 1)
    ids = value["hash_ids"]
    if not isinstance(ids, list) or not all(
        type(each) is int and 0 <= each < 2**64 for each in ids
    ):
        raise _Wrong(f"hash_ids must be a list of integers from 0 to 2^64 - 1, got {shown(ids)}")
    needed = -(-length // BLOCK_TOKENS)
    if len(ids) != needed:
        raise _Wrong(
            f"hash_ids: an input_length of {length} needs {needed} of them, each for "
            f"{BLOCK_TOKENS} tokens, got {len(ids)}"
        )
    seconds = _seconds(value)
    return _Record(
        (ids, length),
        _count("output_length", value["output_length"], 0),
        None,
        None if seconds is None else seconds / 1000,
    )


def _jsonl(value: Any, encode: Encode | None) -> _Record:
    """A line of the plain format: an object, a bare list of token ids, or a bare text."""
    if isinstance(value, (str, list)):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise _Wrong(f"an object, a list of token ids or a string is needed, got {shown(value)}")
    _known_keys(value, _JSONL_KEYS, "jsonl")
    prompt_key, output_key, namespace_key = (
        _only(value, keys) for keys in (_PROMPTS, _OUTPUTS, _NAMESPACES)
    )
    if prompt_key is None:
        raise _Wrong("prompt is missing (or prompt_token_ids)")
    prompt = _tokens(prompt_key, value[prompt_key], encode)
    if not prompt:
        raise _Wrong(f"{prompt_key} must have at least one token, got none")
    output: array[int] | int = 0
    if output_key == "output_tokens":
        output = _count(output_key, value[output_key], 0)
    elif output_key is not None:
        output = _tokens(output_key, value[output_key], encode)
    namespace = value[namespace_key] if namespace_key else None
    if namespace is not None and not isinstance(namespace, str):
        raise _Wrong(f"{namespace_key} must be a string or null, got {shown(namespace)}")
    if namespace is not None and namespace_key is not None:
        _text(namespace_key, namespace)
    return _Record(prompt, output, namespace, _seconds(value))


_PARSERS = {"mooncake": _mooncake, "jsonl": _jsonl}


# -- values ------------------------------------------------------------------------------------


def _known_keys(value: dict[str, Any], known: set[str], format: str) -> None:
    unknown = sorted(set(value) - known)
    if unknown:
        names = ", ".join(map(shown, unknown[:5]))
        raise _Wrong(f"unknown key {names} (in format {format}: {', '.join(sorted(known))})")


def _only(value: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    """Which of these keys is there; two of them contradict each other."""
    present = [key for key in keys if key in value]
    if len(present) > 1:
        raise _Wrong(f"{' and '.join(present)} can't both be given")
    return present[0] if present else None


def _count(name: str, value: Any, least: int) -> int:
    if type(value) is not int or not least <= value <= MAX_TOKEN:
        raise _Wrong(f"{name} must be an integer from {least} to 2^31 - 1, got {shown(value)}")
    return value


def _seconds(value: dict[str, Any]) -> float | None:
    """The timestamp, in the unit of its trace; None if there is none."""
    if "timestamp" not in value:
        return None
    stamp = value["timestamp"]
    if type(stamp) not in (int, float) or not 0 <= stamp < _LATEST:  # no NaN, no infinity
        raise _Wrong(f"timestamp must be a number of at least 0, got {shown(stamp)}")
    return float(stamp)


def _tokens(name: str, value: Any, encode: Encode | None) -> array[int]:
    """Token ids as they are, or those of a text."""
    if isinstance(value, str):
        if name.endswith("_token_ids"):
            raise _Wrong(f"{name} must be a list of token ids, got the text {shown(value)}")
        if encode is None:
            raise _Wrong(f"{name} is a text, which needs --tokenizer MODEL")
        return array("i", encode(_text(name, value), name == "prompt"))
    if not isinstance(value, list):
        kinds = "a list of token ids" if name.endswith("_ids") else "a text or a list of token ids"
        raise _Wrong(f"{name} must be {kinds}, got {shown(value)}")
    if value and (set(map(type, value)) != {int} or not 0 <= min(value) <= max(value) <= MAX_TOKEN):
        bad = next(each for each in value if type(each) is not int or not 0 <= each <= MAX_TOKEN)
        raise _Wrong(f"{name}: token ids must be integers from 0 to 2^31 - 1, got {shown(bad)}")
    return array("i", value)


def _text(name: str, text: str) -> str:
    """A text that can be encoded: JSON may spell halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Wrong(
            f"{name} must be valid Unicode, got a lone surrogate {text[error.start]!a} "
            f"at {error.start}"
        ) from None
    return text


# -- tokens ------------------------------------------------------------------------------------

_Uint64 = np.uint64


def _expand(ids: Iterable[int], length: int) -> array[int]:
    """The first `length` of `BLOCK_TOKENS` tokens for each hash id; equal ids, equal tokens."""
    seeds = _mixed(np.array(list(ids), _Uint64))
    inside = np.arange(1, BLOCK_TOKENS + 1, dtype=_Uint64)
    return _packed((seeds[:, None] + inside * _Uint64(0x9E3779B97F4A7C15)).reshape(-1)[:length])


def _fresh(number: int, count: int) -> array[int]:
    """`count` tokens that no other request has, for the output of the request `number`."""
    seed = _mixed(np.array([number], _Uint64) ^ _Uint64(0xC2B2AE3D27D4EB4F))
    return _packed(seed + np.arange(1, count + 1, dtype=_Uint64) * _Uint64(0x9E3779B97F4A7C15))


def _packed(numbers: np.ndarray) -> array[int]:
    """Mixed numbers (uint64) as token ids: their upper 31 bits."""
    packed = array("i")
    packed.frombytes((_mixed(numbers) >> _Uint64(33)).astype(np.int32).tobytes())
    return packed


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection of uint64."""
    numbers = (numbers ^ numbers >> _Uint64(30)) * _Uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> _Uint64(27)) * _Uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> _Uint64(31)
