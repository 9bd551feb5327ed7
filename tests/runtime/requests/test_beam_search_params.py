"""The parameters of a beam search: what is checked, and what they share with sampling."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams


def test_what_sampling_has_too_is_checked_and_kept_as_there():
    params = BeamSearchParams(3, stop="x", allowed_token_ids=[4], n=2, logit_bias={4: 1})
    assert (params.stop, params.allowed_token_ids) == (("x",), (4,))
    assert params.sampling == SamplingParams(
        n=2, temperature=0.0, stop="x", allowed_token_ids=(4,), logit_bias={4: 1}
    )
    assert replace(params, n=None).sampling.n == 3
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(replace(params, logit_bias=None))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("beam_width", 0),
        ("max_tokens", 0),
        ("n", 5),
        ("early_stopping", "always"),
        ("min_tokens", 17),
        ("temperature", -1.0),
        ("early_stopping", 1),  # equal to True, but transformers takes it for none
        ("temperature", 1e-9),
        ("length_penalty", "long"),
        ("length_penalty", float("nan")),
        ("length_penalty", 31),  # a number of tokens to such a power may be no float
        ("beam_width", 1025),
        ("repetition_penalty", 0),
        ("allowed_token_ids", []),
        ("stop", [""]),
        ("logprobs", -2),
        ("best_so_far", 1),
    ],
)
def test_bad_parameters_are_refused_by_name(option, value):
    with pytest.raises(ValueError, match=option):
        BeamSearchParams(**{"beam_width": 4, option: value})
