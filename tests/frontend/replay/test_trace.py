"""Reading traces: both formats, and the errors for malformed lines and files."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from coppice.frontend.replay.trace import BLOCK_TOKENS, MalformedTrace, Trace, read_trace
from coppice.runtime.offline.replay import ReplayRequest


def encode(text: str, prompt: bool) -> list[int]:
    """A token for each character, after one for the beginning of a prompt."""
    return [1] * prompt + [ord(character) for character in text]


@pytest.fixture
def write(tmp_path: Path):
    def to_file(*lines: object) -> Path:
        """A trace of these lines: bytes as they are, all else as JSON."""
        path = tmp_path / "trace.jsonl"
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"\n".join(raw) + b"\n")
        return path

    return to_file


def requests(trace: Trace) -> list[ReplayRequest]:
    """Its requests, whose sizes must be what the first reading counted."""
    made = list(trace.requests())
    assert len(made) == trace.count
    assert sum(len(each.prompt) for each in made) == trace.prompt_tokens
    assert sum(len(each.output) for each in made) == trace.output_tokens
    assert max(len(each.prompt) + len(each.output) for each in made) == trace.longest
    return made


def mooncake(length: int, ids: list[int], output: int = 3, stamp: float = 0, **more) -> dict:
    return {
        "timestamp": stamp,
        "input_length": length,
        "output_length": output,
        "hash_ids": ids,
        **more,
    }


# -- Mooncake's format -------------------------------------------------------------------------


def test_equal_hash_ids_are_equal_blocks(write) -> None:
    path = write(
        mooncake(1030, [7, 8, 9], stamp=2000),
        mooncake(600, [7, 9], stamp=3500),
        mooncake(512, [8], output=0, stamp=3500),
    )
    trace = read_trace(path)
    assert trace.format == "mooncake"
    first, second, third = requests(trace)
    assert [len(each.prompt) for each in (first, second, third)] == [1030, 600, 512]
    assert [each.time for each in (first, second, third)] == [0.0, 1.5, 1.5]
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:1024] == third.prompt
    assert first.prompt[1024:] == second.prompt[512:518], "the last block is cut"
    assert first.namespace is None
    assert len(set(first.prompt) | set(second.prompt)) == 512 + 512 + 88, "blocks share no token"
    assert requests(trace) == [first, second, third], "a second expansion is the same"


def test_outputs_of_which_only_the_length_is_known_are_fresh(write) -> None:
    first, second, third = requests(
        read_trace(
            write(mooncake(4, [1], output=300), mooncake(4, [1], output=300), mooncake(4, [2]))
        )
    )
    every = [*first.prompt, *first.output, *second.output, *third.prompt, *third.output]
    assert len(set(every)) == len(every)
    assert all(0 <= token < 2**31 for token in every)


def test_ids_that_differ_in_any_of_64_bits_differ(write) -> None:
    ids = [0, 1, 2**32, 2**53, 2**63, 2**64 - 1]
    (one,) = requests(read_trace(write(mooncake(len(ids) * BLOCK_TOKENS, ids))))
    blocks = {tuple(one.prompt[at : at + BLOCK_TOKENS]) for at in range(0, len(one.prompt), 512)}
    assert len(blocks) == len(ids)


def test_harmless_keys_of_such_traces_are_allowed(write) -> None:
    trace = read_trace(write(mooncake(4, [1], session_id="a", turn=2, type="text")))
    assert trace.count == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (mooncake(513, [1]), "hash_ids: an input_length of 513 needs 2 of them, each for 512"),
        (mooncake(512, [1, 2]), "hash_ids: an input_length of 512 needs 1 of them.* got 2"),
        (mooncake(0, []), "input_length must be an integer from 1 to 2\\^31 - 1, got 0"),
        (mooncake(4, [1], output=-1), "output_length must be an integer from 0 .* got -1"),
        (mooncake(4, [1], output=1.0), "output_length must be an integer .* got 1.0"),
        (mooncake(4, [-1]), "hash_ids must be a list of integers from 0 .* got \\[-1\\]"),
        (mooncake(4, [True]), "hash_ids must be a list of integers"),
        (mooncake(4, "1"), "hash_ids must be a list of integers"),  # type: ignore[arg-type]
        (mooncake(4, [1], stamp=-1), "timestamp must be a number of at least 0, got -1"),
        (mooncake(4, [1], prompt="x"), "unknown key 'prompt' \\(in format mooncake: .*hash_ids"),
        ({"hash_ids": [1], "input_length": 4}, "output_length is missing"),
        ([1, 2], "an object is needed, with hash_ids, got \\[1, 2\\]"),
    ],
)
def test_malformed_mooncake_lines(write, line: object, message: str) -> None:
    path = write(mooncake(4, [1]), line)
    with pytest.raises(MalformedTrace, match=f"trace.jsonl:2: {message}"):
        read_trace(path)


# -- plain JSON lines --------------------------------------------------------------------------


def test_every_spelling_of_a_plain_request(write) -> None:
    path = write(
        {"prompt": "ab", "output": "cd", "namespace": "n"},
        {"prompt": [5, 6], "output": [7], "cache_salt": None},
        {"prompt_token_ids": [5], "output_token_ids": [8, 9], "cache_salt": "salt"},
        {"prompt": [5], "output_tokens": 4},
        b"",
        [1, 2, 2**31 - 1],
        "a text",
    )
    trace = read_trace(path, encode=encode)
    assert trace.format == "jsonl"
    made = requests(trace)
    assert [list(each.prompt) for each in made] == [
        [1, 97, 98], [5, 6], [5], [5], [1, 2, 2**31 - 1], [1, *map(ord, "a text")],
    ]  # fmt: skip
    assert [list(each.output) for each in made[:3]] == [[99, 100], [7], [8, 9]]
    assert [len(each.output) for each in made[3:]] == [4, 0, 0]
    assert [each.namespace for each in made] == ["n", None, "salt", None, None, None]
    assert [each.time for each in made] == [0, 1, 2, 3, 4, 5], "a second a request"
    assert trace.longest_line == 7, "counted with the empty line"


def test_timestamps_are_seconds_since_the_first(write) -> None:
    path = write({"prompt": [1], "timestamp": 100.5}, {"prompt": [1], "timestamp": 102})
    assert [each.time for each in requests(read_trace(path))] == [0.0, 1.5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON: .* at character 2"),
        (b'{"prompt": [1]} x', "not JSON: Extra data"),
        (b'"\xff"', "not UTF-8: .* at byte 2"),
        (b"[" * 100_000, "not JSON that can be read"),
        (b"1" * 5000, "not JSON that can be read"),
        (b'{"prompt": [1], "prompt": [2]}', "'prompt' is there twice"),
        (7, "an object, a list of token ids or a string is needed, got 7"),
        ({}, "prompt is missing"),
        ([], "prompt must have at least one token, got none"),
        ({"prompt": None}, "prompt must be a text or a list of token ids, got None"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids must be a list of token ids, got the text"),
        ({"prompt": [1, -2]}, "prompt: token ids must be integers .* got -2"),
        ({"prompt": [2**31]}, "got 2147483648"),
        ({"prompt": [1, True]}, "got True"),
        ({"prompt": [1, 2.0]}, "got 2.0"),
        ({"prompt": [1], "prompt_token_ids": [1]}, "prompt and prompt_token_ids can't both"),
        ({"prompt": [1], "output": [1], "output_tokens": 3}, "output and output_tokens can't both"),
        ({"prompt": [1], "output_tokens": -1}, "output_tokens must be an integer from 0"),
        ({"prompt": [1], "namespace": 3}, "namespace must be a string or null, got 3"),
        ({"prompt": [1], "namespace": "a", "cache_salt": "a"}, "can't both be given"),
        ({"prompt": [1], "timestamp": "now"}, "timestamp must be a number"),
        (b'{"prompt": [1], "timestamp": NaN}', "timestamp must be a number"),
        ({"prompt": [1], "timestamp": None}, "timestamp must be a number"),
        ({"prompt": [1], "max_tokens": 3}, "unknown key 'max_tokens' \\(in format jsonl: "),
        (b'"\\ud800"', "prompt must be valid Unicode, got a lone surrogate"),
        (b'{"prompt": [1], "namespace": "\\ud800"}', "namespace must be valid Unicode"),
    ],
)
def test_malformed_plain_lines(write, line: object, message: str) -> None:
    with pytest.raises(MalformedTrace, match=f"trace.jsonl:2: .*{message}"):
        read_trace(write([1, 2, 3], line), encode=encode)


def test_texts_need_a_tokenizer(write) -> None:
    path = write({"prompt": [1]}, {"prompt": "text"}, {"prompt": [1], "output": "text"})
    with pytest.raises(MalformedTrace) as raised:
        read_trace(path)
    assert f"{path}:2: prompt is a text, which needs --tokenizer MODEL" in str(raised.value)
    assert f"{path}:3: output is a text, which needs --tokenizer MODEL" in str(raised.value)


def test_timestamps_in_disorder_or_for_some_only(write) -> None:
    disorder = write({"prompt": [1], "timestamp": 5}, {"prompt": [1], "timestamp": 4.5})
    with pytest.raises(MalformedTrace, match=r":2: timestamp: 4\.5 s comes after 5 s"):
        read_trace(disorder)
    with pytest.raises(MalformedTrace, match=":2: timestamp: all requests must have one, or none"):
        read_trace(write({"prompt": [1], "timestamp": 5}, {"prompt": [1]}))


# -- the whole file ----------------------------------------------------------------------------


def test_the_first_ten_malformed_lines_are_named_and_all_are_counted(write) -> None:
    path = write(*([1], b"?") * 14)
    with pytest.raises(MalformedTrace) as raised:
        read_trace(path)
    message = str(raised.value).splitlines()
    assert message[0] == "the trace has 14 malformed lines; nothing was replayed"
    lines = [int(line.split(":")[-3]) for line in message[1:11]]
    assert lines == list(range(2, 22, 2))
    assert message[11].strip() == "and 4 more"
    assert len(message) == 12


def test_nothing_is_read_after_the_limit(write) -> None:
    trace = read_trace(write([1], [1, 2], b"?"), limit=2)
    assert trace.count == 2
    assert len(requests(trace)) == 2
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        read_trace(write([1]), limit=0)


def test_the_format_may_be_named(write) -> None:
    path = write(mooncake(4, [1]))
    assert read_trace(path, format="mooncake").format == "mooncake"
    with pytest.raises(MalformedTrace, match=r"unknown key .*in format jsonl"):
        read_trace(path, format="jsonl")
    with pytest.raises(ValueError, match="format must be one of auto, mooncake, jsonl, got 'csv'"):
        read_trace(path, format="csv")


def test_files_that_are_not_traces(tmp_path: Path, write) -> None:
    with pytest.raises(ValueError, match="has no requests"):
        read_trace(write(b"", b"  "))
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_a_file_that_changes_between_the_readings(write) -> None:
    trace = read_trace(write([1], [2]))
    write([1], b"?")
    with pytest.raises(MalformedTrace, match=r":2: not JSON.*changed"):
        list(trace.requests())


def test_a_file_that_gets_shorter_between_the_readings(write) -> None:
    trace = read_trace(write([1], [2], [3]))
    write([1], [2])
    made = trace.requests()
    assert [list(next(made).prompt) for _ in range(2)] == [[1], [2]]
    with pytest.raises(MalformedTrace, match="had 3 requests when it was checked, and has 2 now"):
        next(made)
    write([1], [2], [3], [4])
    assert len(list(trace.requests())) == 3, "a log that grows is read as far as it was checked"


@pytest.mark.parametrize("value", [[1, 2], mooncake(4, [1])])
def test_a_byte_order_mark_at_the_beginning_is_skipped(write, value: object) -> None:
    mark = "\ufeff".encode()
    line = json.dumps(value).encode()
    assert read_trace(write(mark + line, line)).count == 2
    assert read_trace(write(mark, line)).count == 1
    with pytest.raises(MalformedTrace, match=":2: not JSON: Unexpected UTF-8 BOM"):
        read_trace(write(line, mark + line))


def test_a_pipe_is_refused_since_it_could_only_be_half_read() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"[1]\n[2]\n")
        os.close(writing)
        with pytest.raises(ValueError, match="must be a file, since it is read twice"):
            read_trace(Path(f"/dev/fd/{reading}"))
    finally:
        os.close(reading)


def test_requests_are_made_one_at_a_time(write) -> None:
    """The tokens of all requests would take 20 MB; those of one take 0.4 MB."""
    trace = read_trace(write(*(mooncake(512 * 200, list(range(200))) for _ in range(50))))
    assert 4 * trace.prompt_tokens > 20e6
    tracemalloc.start()
    try:
        count = sum(1 for _ in trace.requests())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 50
    assert peak < 8e6
