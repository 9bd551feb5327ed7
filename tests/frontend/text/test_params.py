"""Words of sampling parameters become tokens."""

from __future__ import annotations

from typing import cast

import pytest

from coppice.frontend.text.params import words_as_tokens
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.requests.sampling_params import MAX_PREDICTED, SamplingParams


def test_a_long_prediction_has_the_first_tokens_only(tokenizer: Tokenizer) -> None:
    """The text is cut at a character of two bytes, the tokens perhaps inside of one."""
    text = "ключ é " * 80_000
    params = words_as_tokens(SamplingParams(prediction=text), tokenizer)
    assert params.prediction is None
    assert params.prediction_token_ids is not None
    assert len(params.prediction_token_ids) == MAX_PREDICTED == 65_536
    beginning = tokenizer.encode_more(text[:100_000])
    assert list(params.prediction_token_ids) == beginning[:MAX_PREDICTED]


class Recorder:
    """A tokenizer that notes what it is given."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def encode_more(self, text: str) -> list[int]:
        self.given.append(text)
        return [1, 2]


def test_no_more_of_a_prediction_is_encoded_than_may_be_kept() -> None:
    recorder = Recorder()
    for length in (1, 600_000):
        params = SamplingParams(prediction="é🙂" * length)
        params = words_as_tokens(params, cast(Tokenizer, recorder))
        assert params.prediction_token_ids == (1, 2)
    assert recorder.given == ["é🙂", "é🙂" * (4 * MAX_PREDICTED)]


def test_a_prediction_that_no_tokens_have_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="prediction must be valid Unicode, got a lone surrogate"):
        words_as_tokens(SamplingParams(prediction="a\ud800"), tokenizer)
