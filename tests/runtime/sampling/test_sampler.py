"""Sampling: filters by definition, seeds that do not depend on the batch, refusals by name."""

import math
from array import array

import pytest
import torch

from coppice.runtime.requests.request import Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.sampler import Sampler, uniform_number


def sequence(params, seed=0, prompt=(1, 2), generated=()):
    made = Sequence(Request("r", array("i", prompt), params, None, 0, seed, 1000))
    made.tokens.extend(generated)
    return made


def frequencies(logits, params, draws=4000):
    """Share of each token over many positions of one seeded sequence."""
    made = [sequence(params, seed=5, generated=[0] * i) for i in range(draws)]
    tokens = Sampler(()).sample(logits.repeat(draws, 1), made).read().tokens
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / draws


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, -torch.inf])


def test_greedy_takes_the_most_probable():
    made = [sequence(SamplingParams(temperature=0))]
    assert Sampler(()).sample(LOGITS[None].clone(), made).read().tokens == [4]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-10, 2e-5])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}])
def test_a_temperature_next_to_none_takes_the_most_probable_too(temperature, options):
    made = [sequence(SamplingParams(temperature=temperature, **options))]
    assert Sampler(()).sample(LOGITS[None].clone(), made).read().tokens == [4]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [4, 0]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.5}, [4]),
        ({"top_p": 0.7}, [4, 0]),
        ({"min_p": 0.1}, [4, 0, 1]),
        ({"top_k": 3, "top_p": 0.8}, [4, 0]),
    ],
)
def test_random_sampling_follows_the_filtered_distribution(params, kept):
    made = SamplingParams(**params)
    expected = torch.full_like(LOGITS, -torch.inf)
    expected[kept] = LOGITS[kept] / made.temperature
    expected = expected.softmax(-1)
    got = frequencies(LOGITS, made)
    assert set(got.nonzero().flatten().tolist()) <= set(kept)
    torch.testing.assert_close(got, expected, atol=0.03, rtol=0)


def test_a_seeded_row_does_not_depend_on_the_batch():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    rows = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=3),
        SamplingParams(seed=3, top_p=0.5),
        SamplingParams(seed=4, min_p=0.2, temperature=2.0),
        SamplingParams(seed=5),
    ]
    made = [sequence(params, seed=params.seed or 0) for params in rows]
    together = Sampler(()).sample(logits.clone(), made).read().tokens
    alone = [
        Sampler(()).sample(logits[i : i + 1].clone(), [made[i]]).read().tokens[0] for i in range(6)
    ]
    assert together == alone


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position():
    made = sequence(SamplingParams())
    numbers = []
    for _ in range(4000):
        made.tokens.append(0)
        numbers.append(uniform_number(made))
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == 4000
    assert math.isclose(sum(numbers) / 4000, 0.5, abs_tol=0.02)
    deciles = torch.histc(torch.tensor(numbers), bins=10, min=0, max=1)
    assert deciles.min() > 320 and deciles.max() < 480
    assert uniform_number(sequence(SamplingParams(), seed=1)) != uniform_number(
        sequence(SamplingParams(), seed=2)
    )


def test_min_tokens_suppresses_every_way_to_end_early():
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[0])
    for generated, token in (((), 1), ((1,), 1), ((1, 1), 4)):
        made = sequence(params, generated=generated)
        assert Sampler((4,)).sample(LOGITS[None].clone(), [made]).read().tokens == [token]


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
