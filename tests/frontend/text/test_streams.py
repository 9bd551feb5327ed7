"""What requests have generated, while one thread begins them anew and another drops them."""

from __future__ import annotations

from typing import Any

import pytest

from coppice.frontend.text.streams import Texts
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.requests.request import StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams

PARAMS = SamplingParams(n=2, max_tokens=4, stop="never")


def ended(index: int, *tokens: int) -> StepOutput:
    return StepOutput("a", index, tokens, "length", None, None, 3, 0)


def test_a_request_that_begins_anew_forgets_what_it_had(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    texts.add("a", None, [7, 8, 9], PARAMS, in_pieces=False)
    texts.advance(ended(0, 20, 21))
    assert texts.again("a")
    assert texts.advance(ended(1, 30)) == (None, False)
    delta, _ = texts.advance(ended(0, 31, 32))
    assert delta is not None and delta.output is not None
    assert [each.token_ids for each in delta.output.outputs] == [(31, 32), (30,)]
    assert not texts.again("a"), "it has ended"


def test_a_request_of_which_a_piece_was_seen_does_not_begin_anew(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    texts.add("a", None, [7, 8, 9], PARAMS)
    assert not texts.again("a")
    assert not texts.again("b")


def test_what_is_dropped_while_it_begins_anew_stays_dropped(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client leaves between the look at its request and the new beginning."""
    texts = Texts(tokenizer)
    texts.add("a", None, [7, 8, 9], PARAMS, in_pieces=False)
    text_before = tokenizer.text_before

    def leaving(*args: Any, **more: Any) -> list[int]:
        assert texts.drop("a")
        return text_before(*args, **more)

    monkeypatch.setattr(tokenizer, "text_before", leaving)
    assert not texts.again("a"), "nobody waits for it"
    assert not texts.drop("a"), "its text is kept for ever"
