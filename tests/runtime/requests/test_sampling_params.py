"""What sampling parameters refuse by name, and the form in which they are kept."""

from __future__ import annotations

import math

import pytest

from coppice.runtime.requests.sampling_params import MAX_PREDICTED, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("seed", "x"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 3),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("presence_penalty", 2.5),
        ("presence_penalty", "x"),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", math.inf),
        ("logprobs", -2),
        ("logprobs", True),
        ("logprobs", 1.5),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", "5"),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"1": 2}),
        ("logit_bias", {-1: 2}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: -100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: "x"}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 5),
        ("bad_words", "word"),
        ("bad_words", ["a", ""]),
        ("bad_words", [" "]),
        ("bad_words", [5]),
        ("bad_words_token_ids", [[]]),
        ("bad_words_token_ids", [[-1]]),
        ("bad_words_token_ids", [1]),
        ("logits_processors", [3]),
        ("logits_processors", print),
        ("skip_special_tokens", None),
    ],
)
def test_bad_parameters_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_stops_become_tuples():
    params = SamplingParams(stop="x", stop_token_ids=[3])
    assert params.stop_strings == ("x",) and params.stop_ids == (3,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [40]),
        ("logit_bias", {40: 1.0}),
        ("allowed_token_ids", [1, 40]),
        ("bad_words_token_ids", [[1, 40]]),
        ("logprobs", 41),
        ("prompt_logprobs", 41),
    ],
)
def test_what_the_vocabulary_has_not_is_refused_by_name(name, value):
    params = SamplingParams(**{name: value})
    with pytest.raises(ValueError, match=rf"^{name} must be .* got 4[01]$"):
        params.check_vocabulary(40)
    params.check_vocabulary(41)


def test_parameters_that_leave_no_token_are_refused():
    for more in ({"bad_words_token_ids": [[3], [4]]}, {"stop_token_ids": [3, 4], "min_tokens": 1}):
        with pytest.raises(ValueError, match=r"^allowed_token_ids must leave a token"):
            SamplingParams(allowed_token_ids=[3, 4], **more)


def test_a_long_prediction_is_kept_up_to_a_bound() -> None:
    for ids in ([7] * (MAX_PREDICTED + 5), (7,) * (MAX_PREDICTED + 5)):
        assert SamplingParams(prediction_token_ids=ids).prediction_token_ids == (7,) * MAX_PREDICTED
    with pytest.raises(ValueError, match="prediction_token_ids must be a list of token ids"):
        SamplingParams(prediction_token_ids="abc")  # type: ignore[arg-type]
