"""Usage with cached tokens, echoed prompts, and streams that are cut inside characters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from coppice.frontend.api.openai.answers import UsageSoFar
from coppice.frontend.text.outputs import CompletionOutput, RequestOutput, TextDelta

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer

TEXT = "naïve 東京 🙂🙃 Привет 👩‍👩‍👧 é̂ ßß — 𝒳"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def http(tool_server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tool_server.url, timeout=60) as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json={"model": "tiny", "max_tokens": 4} | body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    body = {"model": "tiny", "max_tokens": 4, "stream": True} | body
    body["stream_options"] = {"include_usage": True}
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n")[:-2]]


def cached(answer: Any) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


BEAMS = {"use_beam_search": True, "beam_width": 3, "n": 2}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"n": 3}, BEAMS, {"n": 2, "logprobs": 1}], ids=["one", "n", "beams", "logprobs"]
)
def test_cached_tokens_are_counted_once_a_prompt(
    http: httpx.Client, more: dict[str, Any], streamed: bool
) -> None:
    """The tokens and hits of a prompt are counted once, however many continuations it has."""

    def ask(prompt: Any) -> tuple[int, int]:
        body = {"prompt": prompt, "cache_salt": f"{streamed} {more}"} | more
        if streamed:
            return cached(stream(http, COMPLETIONS, **body)[-1])
        return cached(post(http, COMPLETIONS, **body))

    prompt = "This is a prompt that nobody has asked for"
    first, count = ask(prompt)
    assert first == 0
    assert ask(prompt) == (count - 1, count)
    assert ask([prompt, prompt]) == (2 * (count - 1), 2 * count)


def test_cached_tokens_of_chats(http: httpx.Client) -> None:
    talk = [{"role": "user", "content": "A question that nobody has asked before."}]
    _, count = cached(post(http, CHAT, messages=talk))
    assert cached(post(http, CHAT, messages=talk, n=2)) == (count - 1, count)
    longer = [*talk, {"role": "assistant", "content": "So?"}, {"role": "user", "content": "Well!"}]
    hit, more = cached(stream(http, CHAT, messages=longer)[-1])
    assert count - 2 <= hit < more  # all of the first question and its template
    off = cached(post(http, CHAT, messages=talk, cache_salt="another"))
    assert off == (0, count)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streams_never_cut_a_character(http: httpx.Client, path: str) -> None:
    """Each of these characters is several tokens; the pieces add up, none has half of one."""
    body: dict[str, Any] = {"guided_choice": [TEXT], "max_tokens": 300, "n": 2}
    body |= {"prompt": "x"} if path == COMPLETIONS else {"messages": [
        {"role": "user", "content": "x"}]}  # fmt: skip
    texts = ["", ""]
    pieces = 0
    for event in stream(http, path, **body):
        for choice in event["choices"]:
            piece = choice.get("text", choice.get("delta", {}).get("content")) or ""
            piece.encode()  # no half of a surrogate pair either
            assert "\ufffd" not in piece
            texts[choice["index"]] += piece
            pieces += bool(piece)
    assert texts == [TEXT, TEXT]
    assert pieces > 20


def test_an_echo_stands_before_the_text(http: httpx.Client) -> None:
    prompt = "Where is the 東京 key?"
    body: dict[str, Any] = {"temperature": 0, "logprobs": 2}
    plain = post(http, COMPLETIONS, prompt=prompt, prompt_logprobs=2, **body)
    echoed = post(http, COMPLETIONS, prompt=prompt, echo=True, **body)
    (choice,), (bare,) = echoed["choices"], plain["choices"]
    assert choice["text"] == prompt + bare["text"]
    assert "prompt_logprobs" not in choice
    found, alone = choice["logprobs"], bare["logprobs"]
    count = echoed["usage"]["prompt_tokens"]
    assert {len(column) for column in found.values()} == {count + 4}
    assert found["tokens"][count:] == alone["tokens"]
    assert found["token_logprobs"][count:] == pytest.approx(alone["token_logprobs"], abs=1e-4)
    assert found["text_offset"][count:] == [len(prompt) + at for at in alone["text_offset"]]
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    ids = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    own = [
        place[str(token)]["logprob"]
        for token, place in zip(ids[1:], bare["prompt_logprobs"][1:], strict=True)
    ]
    assert found["token_logprobs"][1:count] == pytest.approx(own, abs=1e-4)
    for token, offset in zip(found["tokens"][:count], found["text_offset"][:count], strict=True):
        if "\ufffd" not in token:
            assert prompt[offset : offset + len(token)] == token
    both = post(http, COMPLETIONS, prompt=[ids, "b"], echo=True, n=2, temperature=0)
    texts = [choice["text"] for choice in both["choices"]]
    assert texts[:2] == [prompt + bare["text"]] * 2
    assert all(text.startswith("b") for text in texts[2:])
    events = stream(http, COMPLETIONS, prompt=prompt, echo=True, temperature=0)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == choice["text"]


def test_nothing_but_the_echo(http: httpx.Client) -> None:
    """max_tokens 0 is for the logprobs of a text; the generated token is not part of the answer."""
    more = {"echo": True, "logprobs": 2, "temperature": 0, "prompt": ["The key is", "東京"]}
    longer = post(http, COMPLETIONS, **more, max_tokens=1)
    only = post(http, COMPLETIONS, **more, max_tokens=0)
    for choice, other in zip(only["choices"], longer["choices"], strict=True):
        assert choice["text"] == more["prompt"][choice["index"]]  # type: ignore[index]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        for name, column in choice["logprobs"].items():
            assert column[0] == other["logprobs"][name][0]
            assert len(column) == len(other["logprobs"][name]) - 1
        known = choice["logprobs"]["token_logprobs"][1:]
        assert known == pytest.approx(other["logprobs"]["token_logprobs"][1:-1], abs=1e-4)
    assert only["usage"]["completion_tokens"] == 0
    assert only["usage"]["total_tokens"] == only["usage"]["prompt_tokens"]
    (plain,) = post(http, COMPLETIONS, prompt="The key", echo=True, max_tokens=0)["choices"]
    assert (plain["text"], plain["logprobs"]) == ("The key", None)
    answer = http.post(COMPLETIONS, json={"model": "tiny", "prompt": "a", "max_tokens": 0})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"


def test_counts_of_a_text_that_leaves_after_the_requests_end() -> None:
    """Pieces of several results that wait together leave result by result."""
    so_far = UsageSoFar([[1, 2, 3]])
    made = [
        CompletionOutput(index, "", (7,) * tokens, "length", None)
        for index, tokens in enumerate((2, 3))
    ]
    whole = RequestOutput("r", None, (1, 2, 3), made, True, 0)
    so_far.add(0, TextDelta("r", "a", (7,), None))
    so_far.add(0, TextDelta("r", "b", (7,), whole))
    assert so_far.now()["completion_tokens"] == 5
    so_far.add(0, TextDelta("r", "c", (7, 7, 7), None, index=1))
    assert so_far.now()["completion_tokens"] == 5


def test_nothing_is_counted_of_a_prompt_alone(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "The key", "max_tokens": 0, "echo": True, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    response = http.post(COMPLETIONS, json=body)
    events = [json.loads(each.removeprefix("data: ")) for each in response.text.split("\n\n")[:-2]]
    assert {event["usage"]["completion_tokens"] for event in events} == {0}
