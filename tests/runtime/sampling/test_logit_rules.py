"""Penalties, biases, bans and functions against transformers' own processors, row by row."""

from __future__ import annotations

import random
import re
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from coppice.runtime.requests.request import Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.logit_rules import apply_rules
from coppice.runtime.sampling.sampler import Sampler
from coppice.runtime.sampling.token_rules import TokenCounts

VOCABULARY = 40


def sequence(params: SamplingParams, prompt=(1, 2), generated=()) -> Sequence:
    made = Sequence(Request("r", array("i", prompt), params, None, 0, 0, 1000))
    made.tokens.extend(generated)
    return made


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def shaped(logits, *sequences, eos=()):
    logits = logits.clone()
    assert apply_rules(logits, sequences, eos)[0] == {}
    return logits


def random_tokens(seed: int) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))]
    return prompt, [rng.randrange(VOCABULARY) for _ in range(rng.randrange(0, 30))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.7])
def test_repetition_penalty_is_that_of_transformers(seed: int, penalty: float) -> None:
    prompt, generated = random_tokens(seed)
    logits = random_logits(1, seed)
    ids = torch.tensor([prompt + generated])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    made = sequence(SamplingParams(repetition_penalty=penalty), prompt, generated)
    torch.testing.assert_close(shaped(logits, made), expected, atol=0, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_presence_and_frequency_penalties_count_generated_tokens_only(seed: int) -> None:
    """By OpenAI's formula: mu[j] - c[j] * frequency - (c[j] > 0) * presence."""
    prompt, generated = random_tokens(seed)
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=-0.3)
    logits = random_logits(1, seed)
    expected = logits.clone()
    for token in range(VOCABULARY):
        count = generated.count(token)
        expected[0, token] -= count * -0.3 + float(count > 0) * 0.7
    torch.testing.assert_close(shaped(logits, sequence(params, prompt, generated)), expected)


@pytest.mark.parametrize("seed", range(30))
def test_bad_words_are_those_of_transformers(seed: int) -> None:
    """Words that begin in the prompt, overlap, repeat or are longer than the text included."""
    rng = random.Random(seed)
    prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
    generated = [rng.randrange(3) for _ in range(rng.randrange(0, 6))]
    words = [[rng.randrange(3) for _ in range(rng.choice([1, 2, 2, 3, 12]))] for _ in range(4)]
    logits = random_logits(1, seed)
    reference = NoBadWordsLogitsProcessor(words, eos_token_id=[])
    expected = reference(torch.tensor([prompt + generated]), logits.clone())
    made = sequence(SamplingParams(bad_words_token_ids=words), prompt, generated)
    torch.testing.assert_close(shaped(logits, made), expected, atol=0, rtol=0)


def test_logit_bias_is_added() -> None:
    bias = {3: 100.0, 7: -2.5, 0: 0.25}
    logits = random_logits(1)
    reference = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = reference(torch.tensor([[1, 2]]), logits.clone())
    got = shaped(logits, sequence(SamplingParams(logit_bias=bias)))
    torch.testing.assert_close(got, expected)


def test_only_allowed_tokens_are_left_and_they_are_as_before() -> None:
    logits = random_logits(1)
    got = shaped(logits, sequence(SamplingParams(allowed_token_ids=[5, 9, 5])))
    expected = torch.full_like(logits, -torch.inf)
    expected[0, [5, 9]] = logits[0, [5, 9]]
    assert torch.equal(got, expected)


def test_min_tokens_forbid_every_end() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=[4])
    logits = random_logits(2)
    got = shaped(logits, sequence(params), sequence(params, generated=[9]), eos=(6, VOCABULARY + 1))
    assert got[0].isinf().nonzero().flatten().tolist() == [4, 6]
    assert torch.equal(got[1], logits[1])


FEATURES = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.sampled_from([0.0, -1.0, 0.6]),
        "frequency_penalty": st.sampled_from([0.0, 1.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.dictionaries(st.integers(0, 9), st.floats(-9, 9), max_size=4),
        "allowed_token_ids": st.lists(st.integers(10, 30), min_size=1, max_size=9),
        "bad_words_token_ids": st.lists(
            st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4
        ),
        "logits_processors": st.just([lambda generated, logits: logits * 0.5 + len(generated)]),
        "logprobs": st.sampled_from([-1, 0, 3, 7]),
        "temperature": st.sampled_from([0.0, 0.7]),
        "min_tokens": st.sampled_from([0, 4]),
    },
)


@given(
    st.lists(
        st.tuples(FEATURES, st.lists(st.integers(0, 3), min_size=1, max_size=6),
                  st.lists(st.integers(0, 3), max_size=6)),
        min_size=1, max_size=6,
    )
)  # fmt: skip
def test_a_row_of_a_mixed_batch_is_what_it_is_alone(rows) -> None:
    made = [
        sequence(SamplingParams(**features), prompt, generated)
        for features, prompt, generated in rows
    ]
    logits = random_logits(len(rows))
    together = Sampler((7,)).sample(logits.clone(), made).read()
    for row, (features, prompt, generated) in enumerate(rows):
        one = sequence(SamplingParams(**features), prompt, generated)
        alone = Sampler((7,)).sample(logits[row : row + 1].clone(), [one]).read()
        assert together.tokens[row] == alone.tokens[0]
        mine, theirs = together.logprobs[row], alone.logprobs[0]
        assert (mine is None) == (theirs is None) == ("logprobs" not in features)
        if mine is not None and theirs is not None:
            assert mine.top_ids.tolist() == theirs.top_ids.tolist()
            torch.testing.assert_close(mine.top_logprobs, theirs.top_logprobs)
            assert mine.ranks.tolist() == theirs.ranks.tolist()


def test_rows_without_rules_are_not_touched() -> None:
    logits = random_logits(3)
    penalised = sequence(SamplingParams(repetition_penalty=2.0), generated=[3])
    got = shaped(logits, sequence(SamplingParams()), penalised, sequence(SamplingParams(top_k=3)))
    assert torch.equal(got[[0, 2]], logits[[0, 2]])
    assert not torch.equal(got[1], logits[1])


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(1, 5))
def test_counts_kept_by_the_token_are_those_of_the_whole(generated, step) -> None:
    made = sequence(SamplingParams(), prompt=[4, 9, 4])
    counts = TokenCounts(made.request.prompt_token_ids)
    for begin in range(0, len(generated), step):
        made.tokens.extend(generated[begin : begin + step])
        counts.update(made)
    found = dict(zip(counts.ids, counts.times, strict=True))
    assert found == {token: generated.count(token) for token in {4, 9, *generated}}


def test_functions_see_the_tokens_so_far_and_come_before_all_else() -> None:
    seen = []

    def two(generated, logits):
        seen.append(generated)
        logits[5] = 50.0  # in place, and returned
        return logits

    class Three:
        def __call__(self, prompt, generated, logits):
            seen.append((prompt, generated))
            return logits + 1

    params = SamplingParams(logits_processors=[two, Three()], logit_bias={5: -3.0})
    logits = random_logits(1)
    got = shaped(logits, sequence(params, prompt=[8, 9], generated=[3]))
    assert seen == [[3], ([8, 9], [3])]
    expected = logits + 1
    expected[0, 5] = 48.0
    torch.testing.assert_close(got, expected)


def raising(generated, logits):
    raise KeyError("nothing here")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logits_processors": [raising]}, r"logits_processors\[0\] failed: KeyError"),
        ({"logits_processors": [lambda t, x: None]}, "must return a tensor of shape .40,., got N"),
        ({"logits_processors": [lambda t, x: x[:3]]}, "must return a tensor of shape .40,., got"),
        ({"logits_processors": [lambda t, x: x * torch.nan]}, "infinite or NaN"),
        ({"logits_processors": [lambda t, x: x - torch.inf]}, "no token is left"),
        ({"allowed_token_ids": [3], "bad_words_token_ids": [[2, 3]]}, "no token is left"),
    ],
)
def test_what_fails_in_one_row_leaves_the_others_alone(params, message: str) -> None:
    logits = random_logits(3)
    fine = [sequence(SamplingParams(temperature=t)) for t in (0.0, 1.0)]
    bad = sequence(SamplingParams(**params))
    sampled = Sampler(()).sample(logits.clone(), [fine[0], bad, fine[1]]).read()
    assert list(sampled.errors) == [1]
    assert re.search(message, sampled.errors[1])
    alone = Sampler(()).sample(logits[[0, 2]].clone(), fine).read()
    assert [sampled.tokens[0], sampled.tokens[2]] == alone.tokens
    assert not alone.errors
