"""Text around the engine: when requests end, what their text is, and that nothing overshoots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest

from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.outputs import TextDelta
from coppice.frontend.text.streams import Texts
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.request import BestLine, StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams


class ScriptedEngine:
    """An engine that generates given tokens, step by step, and records what was aborted.

    `drafts`: how many it drafted and accepted.
    """

    def __init__(
        self,
        steps: Iterable[tuple[int, ...]],
        finish: tuple[str, Any],
        drafts: tuple[int, int] = (0, 0),
    ) -> None:
        self.drafts = drafts
        self.steps = list(steps)
        self.finish = finish
        self.aborted: list[str] = []
        self.request_id: str | None = None

    def add_request(self, request_id: str, *rest: Any, **options: Any) -> None:
        self.request_id = request_id

    def abort(self, request_id: str, index: int | None = None) -> bool:
        known = request_id == self.request_id
        if known:
            self.aborted.append(request_id)
            self.request_id = None
        return known

    def has_unfinished(self) -> bool:
        return self.request_id is not None

    def step(self) -> list[StepOutput]:
        assert self.request_id is not None, "a step after the request was aborted"
        tokens = self.steps.pop(0)
        reason, detail = (None, None) if self.steps else self.finish
        error = detail if reason == "error" else None
        stop = detail if reason == "stop" else None
        output = StepOutput(self.request_id, 0, tokens, reason, stop, error, 5, 3)
        output.drafted, output.accepted = self.drafts
        if reason is not None:
            self.request_id = None
        return [output]


def run(
    tokenizer: Tokenizer,
    steps: Iterable[tuple[int, ...]],
    finish: tuple[str, Any] = ("length", None),
    drafts: tuple[int, int] = (0, 0),
    **params: Any,
) -> tuple[ScriptedEngine, list[TextDelta]]:
    """All deltas of one request over a scripted engine."""
    engine = ScriptedEngine(steps, finish, drafts)
    text_engine = TextEngine(cast(Engine, engine), tokenizer)
    text_engine.add("a", "prompt", [1, 2, 3, 4, 5], SamplingParams(**params))
    deltas = []
    while text_engine.has_unfinished():
        deltas += text_engine.step()
    assert not text_engine.texts.drop("a"), "its text is still kept"
    return engine, deltas


def singly(tokenizer: Tokenizer, text: str) -> list[tuple[int, ...]]:
    return [(token,) for token in tokenizer.encode(text)]


def test_deltas_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = "The key 🙂 is under 東京"
    _, deltas = run(tokenizer, singly(tokenizer, text))
    output = deltas[-1].output
    assert output is not None
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text == text
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].token_ids == tuple(tokenizer.encode(text))
    assert output.prompt == "prompt"
    assert output.prompt_token_ids == (1, 2, 3, 4, 5)
    assert output.cached_tokens == 3
    assert all(delta.output is None for delta in deltas[:-1])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_request_before_the_next_step(
    tokenizer: Tokenizer, include: bool
) -> None:
    text = "the mat is at the door of the house"
    engine, deltas = run(
        tokenizer, singly(tokenizer, text), stop=["he doo"], include_stop_str_in_output=include
    )
    output = deltas[-1].output
    assert output is not None
    assert engine.aborted == ["a"]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == "he doo"
    expected = "the mat is at the doo" if include else "the mat is at t"
    assert output.outputs[0].text == expected
    assert "".join(delta.text for delta in deltas) == expected
    generated = tokenizer.decode(output.outputs[0].token_ids)
    assert "he doo" in generated
    assert "he doo" not in tokenizer.decode(output.outputs[0].token_ids[:-1])


def test_a_stop_string_in_the_middle_of_many_new_tokens(tokenizer: Tokenizer) -> None:
    """Tokens after the one that completed it are not part of the result."""
    ids = tuple(tokenizer.encode("the mat is at the door"))
    _, deltas = run(tokenizer, [ids], stop="mat")
    output = deltas[-1].output
    assert output is not None
    assert output.outputs[0].text == "the "
    assert tokenizer.decode(output.outputs[0].token_ids).endswith("mat")
    assert deltas[-1].new_token_ids == output.outputs[0].token_ids


def test_drafted_tokens_after_a_stop_string_do_not_count_as_accepted(tokenizer: Tokenizer) -> None:
    ids = tuple(tokenizer.encode("the mat is at the door"))
    _, deltas = run(tokenizer, [ids], drafts=(len(ids), len(ids) - 1), stop="mat")
    output = deltas[-1].output
    assert output is not None
    kept = len(output.outputs[0].token_ids)
    assert kept < len(ids) - 1
    assert output.accepted_tokens == deltas[-1].accepted_tokens == kept
    assert output.drafted_tokens == len(ids)


def test_a_stop_string_in_the_last_tokens_outranks_the_length(tokenizer: Tokenizer) -> None:
    engine, deltas = run(tokenizer, singly(tokenizer, "the key"), stop="ey")
    output = deltas[-1].output
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("the k", "stop")
    assert not engine.aborted, "the engine had ended it already"


def test_what_could_have_begun_a_stop_string_comes_at_the_end(tokenizer: Tokenizer) -> None:
    _, deltas = run(tokenizer, singly(tokenizer, "the key"), stop="key!")
    assert "".join(delta.text for delta in deltas) == "the key"
    assert deltas[-1].text.endswith("key")


def test_min_tokens_hold_for_stop_strings(tokenizer: Tokenizer) -> None:
    steps = singly(tokenizer, "a a a a a a")
    count = len(steps)
    _, deltas = run(tokenizer, steps, stop="a", min_tokens=count - 1, max_tokens=count)
    output = deltas[-1].output
    assert output is not None
    assert output.outputs[0].text == "a a a a a "
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_not_part_of_the_text(tokenizer: Tokenizer, include: bool) -> None:
    *before, last = tokenizer.encode("the key")
    _, deltas = run(
        tokenizer,
        singly(tokenizer, "the key"),
        ("stop", last),
        stop_token_ids=[last],
        include_stop_str_in_output=include,
    )
    output = deltas[-1].output
    assert output is not None
    assert output.outputs[0].text == ("the key" if include else tokenizer.decode(before))
    assert output.outputs[0].stop_reason == last
    assert output.outputs[0].token_ids == (*before, last)


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    end = tokenizer.wrapped.eos_token_id
    steps = [*singly(tokenizer, "the"), (end,), *singly(tokenizer, "key")]
    _, hidden = run(tokenizer, steps)
    _, shown = run(tokenizer, steps, skip_special_tokens=False)
    assert "".join(delta.text for delta in hidden) == "thekey"
    assert "".join(delta.text for delta in shown) == "the<|end|>key"


def test_a_failed_step_has_a_reason(tokenizer: Tokenizer) -> None:
    _, deltas = run(tokenizer, [*singly(tokenizer, "the"), ()], ("error", "out of cheese"))
    output = deltas[-1].output
    assert output is not None
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].stop_reason == "out of cheese"
    assert output.outputs[0].text == "the"


@pytest.mark.parametrize(
    "text", ["", "a", "The key 東京 🙂\n <|end|>x", " two  spaces ", "e\u0302"]
)
def test_tokens_are_those_of_transformers(tokenizer: Tokenizer, text: str) -> None:
    """Encoding without transformers gives the same as with it."""
    assert tokenizer._encoder is not None
    for special, encode in ((True, tokenizer.encode), (False, tokenizer.encode_more)):
        wanted = tokenizer.wrapped(text, add_special_tokens=special)["input_ids"]
        assert encode(text) == wanted


def test_the_best_beam_so_far_ends_at_its_first_stop_string(tokenizer: Tokenizer) -> None:
    """The last token may complete it more than once; before, only min_tokens let it pass."""
    spelled = ((token, tokenizer.decode([token])) for token in range(5, 384))
    last, piece, stop = next(
        (token, text, each)
        for token, text in spelled
        for each in text
        if text.count(each) > 1 and each.isalpha()
    )
    before = tokenizer.encode(stop + "x" + stop)
    for include in (False, True):
        texts = Texts(tokenizer)
        params = SamplingParams(
            stop=stop, include_stop_str_in_output=include, min_tokens=len(before), max_tokens=40
        )
        texts.add("a", "prompt", [1, 2, 3], params)
        step = StepOutput("a", 0, (), None, None, None, 3, 0)
        step.best_so_far = BestLine((*before, last), -1.0, -1.0, "stop", stop)
        delta, stopped = texts.advance(step)
        assert not stopped and delta is not None and delta.best_so_far is not None
        end = piece[: piece.index(stop) + include]
        assert delta.best_so_far.text == stop + "x" + stop + end
