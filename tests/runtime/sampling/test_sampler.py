"""Sampling: filters by definition, and seeded choices that do not depend on the batch."""

import math
from array import array

import numpy as np
import pytest
import torch

from coppice.runtime.requests.request import Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.sampler import Sampler, _key, _uniform


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


def test_uniform_numbers_are_uniform_and_differ_by_seed_index_and_position():
    request = sequence(SamplingParams()).request
    key = _key(Sequence(request))
    positions = np.arange(4000, dtype=np.uint64)
    numbers = _uniform(np.full(4000, key, np.uint64), positions)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == 4000
    assert math.isclose(numbers.mean(), 0.5, abs_tol=0.02)
    deciles, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert deciles.min() > 320 and deciles.max() < 480
    assert len({key, _key(Sequence(request, 1)), _key(sequence(SamplingParams(), seed=1))}) == 3
