"""What each source proposes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Hashable
from dataclasses import replace

import pytest

from coppice.radix import Namespace
from coppice.radix.mirror.suffixes.index import SuffixIndex
from coppice.runtime.requests.request import AdapterUse, Request, Sequence
from coppice.runtime.requests.sampling_params import MAX_PREDICTED, SamplingParams
from coppice.runtime.sampling.drafts.predicted import PredictedDrafts
from coppice.runtime.sampling.drafts.source import Proposed
from coppice.runtime.sampling.drafts.suffixes import SuffixDrafts
from coppice.runtime.sampling.drafts.trust import Luck, Trust


def sequence(
    prompt: list[int], output: list[int], namespace: Hashable = None, **params: object
) -> Sequence:
    made = Sequence(
        Request(
            "a", array("i", prompt), SamplingParams(max_tokens=1000, **params),  # type: ignore[arg-type]
            namespace, 0, 0, 10_000,
        )
    )  # fmt: skip
    made.tokens.extend(output)
    return made


def tokens(proposed: list[Proposed]) -> list[int]:
    assert [each.parent for each in proposed] == list(range(-1, len(proposed) - 1))
    return [each.token for each in proposed]


def test_text_of_a_namespace_is_found_in_it_and_nowhere_else() -> None:
    source = SuffixDrafts(SuffixIndex(10_000))
    first = sequence([1, 2, 3, 4, 5], [6, 7, 8, 9], "a")
    source.propose(first, 8)
    first.tokens.append(10)
    source.ended(first)
    assert tokens(source.propose(sequence([0, 7], [8], "a"), 8)) == [9, 10]
    assert source.propose(sequence([0, 7], [8], "b"), 8) == []
    assert source.propose(sequence([0, 7], [8]), 8) == []


@pytest.mark.parametrize("mark", [None, 1 << 30])
def test_the_text_of_an_adapter_leaves_with_it(mark: int | None) -> None:
    """Of one with namespaces of its own, and of one that is invoked in the base model's."""
    source = SuffixDrafts(SuffixIndex(10_000))

    def asked(adapter: str | None, output: list[int]) -> Sequence:
        namespace = Namespace("m", None if mark is not None else adapter, "salt")
        made = sequence([1, 2, 3, 4], output, namespace)
        if adapter is not None and mark is not None:
            number = "xy".index(adapter)
            made.request = replace(made.request, adapter=AdapterUse(number, 1, mark + number))
        return made

    for adapter, token in ((None, 10), ("x", 11), ("y", 12)):
        source.ended(asked(adapter, [5, 6, token]))
    for adapter, token in ((None, 10), ("x", 11), ("y", 12)):
        assert tokens(source.propose(asked(adapter, [5, 6]), 1)) == [token]
    source.forget_adapter("x", mark)
    assert source.propose(asked("x", [5, 6]), 1) == []
    assert tokens(source.propose(asked(None, [5, 6]), 1)) == [10]
    assert tokens(source.propose(asked("y", [5, 6]), 1)) == [12]


def test_an_adapter_leaves_all_its_namespaces() -> None:
    source = SuffixDrafts(SuffixIndex(10_000))
    spaces = [Namespace("m", adapter, salt) for adapter in ("x", "y") for salt in ("a", "b")]
    for space in spaces:
        source.ended(sequence([1, 2, 3, 4], [5, 6, 7], space))
    source.forget_adapter("x", None)
    for space in spaces:
        proposed = source.propose(sequence([3, 4], [5], space), 1)
        assert bool(proposed) == (space.adapter == "y")


def test_what_was_never_asked_for_is_entered_when_it_ends() -> None:
    source = SuffixDrafts(SuffixIndex(10_000))
    source.ended(sequence([1, 2], [3, 4]))
    assert tokens(source.propose(sequence([2], [3]), 4)) == [4]
    source.ended(sequence([5, 6, 7], []))  # nothing was generated
    assert source.propose(sequence([5], [6]), 4) == []


def test_more_equal_tokens_are_likelier() -> None:
    source = SuffixDrafts(SuffixIndex(10_000))
    source.ended(sequence(list(range(20)), [30]))
    short = source.propose(sequence([99, 5], [6]), 1)[0].first
    long = source.propose(sequence([0, 1, 2, 3, 4, 5], [6]), 1)[0].first
    assert short < long


def test_a_prediction_is_followed_and_found_again() -> None:
    source = PredictedDrafts()
    predicted = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    own = sequence([1], [10], prediction_token_ids=predicted)
    assert tokens(source.propose(own, 3)) == [11, 12, 13]
    own.tokens.extend([11, 99])  # instead of 12
    assert tokens(source.propose(own, 2)) == [13, 14]
    own.tokens.extend([13])
    assert tokens(source.propose(own, 2)) == [14, 15]
    own.tokens.extend([98, 97, 96])  # more than one token: it waits at the next one
    assert tokens(source.propose(own, 2)) == [15, 16]
    own.tokens.extend([17])  # what was left out
    assert tokens(source.propose(own, 5)) == [18, 19]
    own.tokens.extend([18, 19])
    assert source.propose(own, 5) == []
    own.tokens.extend([12, 13])  # it is written again
    assert tokens(source.propose(own, 2)) == [14, 15]
    source.ended(own)
    assert source.propose(sequence([1], [2]), 5) == []


def test_a_prediction_is_found_where_most_is_equal() -> None:
    predicted = [1, 2, 3, 50, 9, 2, 3, 60]
    source = PredictedDrafts()
    own = sequence([0], [77, 76, 9, 2, 3], prediction_token_ids=predicted)
    assert tokens(source.propose(own, 1)) == [60]


def test_places_of_a_prediction_that_repeats_are_bounded() -> None:
    """The nearest ones are looked at: those of a text of one token would delay everybody."""
    predicted = [1, 2] * 100_000
    predicted[50_000:50_003] = [7, 8, 9]
    source, own = PredictedDrafts(), sequence([0], [], prediction_token_ids=predicted)
    assert [each.token for each in source.propose(own, 3)] == [1, 2, 1]
    own.tokens.extend([7, 8])
    assert [each.token for each in source.propose(own, 2)] == [9, 2]
    for turn in range(20):
        own.tokens.extend([5, 1, 2])
        assert [each.token for each in source.propose(own, 2)] == [1, 2], turn
    (follower,) = source._followers.values()
    assert abs(follower.at - 50_003) < 200, "nearest to where it was"
    assert len(follower.prediction.tokens) == MAX_PREDICTED < len(predicted)


def test_samples_of_a_request_share_what_is_looked_up() -> None:
    source, predicted = PredictedDrafts(), [10, 11, 12, 13, 14]
    samples = [sequence([1], [10], prediction_token_ids=predicted)]
    samples += [Sequence(samples[0].request, index) for index in (1, 2)]
    other = sequence([1], [10, 13], prediction_token_ids=predicted)
    for own, output in zip(samples, ([99], [10, 98], [97, 12]), strict=True):
        own.tokens.extend(output)
        source.propose(own, 2)
    source.propose(other, 2)
    for own, coming in zip(samples, (13, 14, 12), strict=True):
        own.tokens.extend((coming - 2, coming - 1))
        assert source.propose(own, 1)[0].token == coming
    pairs = [id(source._followers[own].prediction._pairs) for own in (*samples, other)]
    assert len(set(pairs[:3])) == 1 and source._followers[other].prediction._pairs
    assert pairs[3] != pairs[0]
    for ended, kept in ((samples[0], 2), (other, 1), (samples[2], 1), (samples[1], 0)):
        source.ended(ended)
        assert len(source._predictions) == kept


@pytest.mark.parametrize("seed", range(5))
def test_a_prediction_with_edits_is_mostly_followed(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(50) for _ in range(400)]
    predicted = list(text)
    for _ in range(12):
        at = rng.randrange(len(predicted))
        kind = rng.randrange(3)
        if kind == 0:
            predicted[at] = 99
        elif kind == 1:
            predicted[at:at] = [98, 97, 96]
        else:
            del predicted[at : at + 5]
    source, right = PredictedDrafts(), 0
    own = sequence([0], [], prediction_token_ids=predicted)
    for token in text:
        proposed = source.propose(own, 1)
        right += bool(proposed) and proposed[0].token == token
        own.tokens.append(token)
    assert right > 300


def test_trust_and_luck_learn() -> None:
    trust = Trust()
    assert trust.probability(("text", 1), 0.7) == pytest.approx(0.7)
    for number in range(2000):
        trust.learn(("text", 1), number % 4 == 0)
    assert trust.probability(("text", 1), 0.7) == pytest.approx(0.25, abs=0.05)
    assert trust.probability(("text", 2), 0.7) == pytest.approx(0.7)
    luck = Luck()
    assert luck.factor == 1.0
    for _ in range(20):
        luck.learn(0.8, False)
    assert luck.factor < 0.25


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prediction", 3, "prediction must be a text or None, got 3"),
        ("prediction_token_ids", [1, -1], "prediction_token_ids must be a list of token ids"),
    ],
)
def test_predictions_that_are_none_are_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_a_prediction_has_tokens_of_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="prediction_token_ids must be from 0 to 9, got 10"):
        SamplingParams(prediction_token_ids=[3, 10]).check_vocabulary(10)
