"""Drafts from a draft model: if it runs at all, for which sequences, and how deep."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from coppice.runtime.requests.request import Sequence
from coppice.runtime.sampling.drafts.network import DraftNetwork, Guess
from coppice.runtime.sampling.drafts.passes import PassCosts
from coppice.runtime.sampling.drafts.source import Proposed
from coppice.runtime.sampling.drafts.trust import Trust

SOURCE = "model"

DEEPEST = 16
"""Tokens of a chain; there are more of them in the next step."""

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, DEEPEST)  # for which time and tokens are compared
_GAIN = 1.03  # the least that drafts must promise beside those of other sources
_SOON = 32  # missing tokens that are computed at once: about as long as one
_LEAST_PIECE = 64  # tokens of a prompt that a step computes for a draft model, at least
_UNKNOWN = 0.1  # of the time that a text took, for what was hardly tried
_LEAST = 0.02  # branches that are less likely are not proposed
_CONFIDENCES = 12  # probabilities from which tokens are as likely
_SAMPLED, _BESIDE = 16, 32  # numbers of kinds: of random choices, and of tokens beside the chosen


class _Rate:
    """The share of the draft model's tokens that are right, with what is known of others.

    Evidence fades with every step, so that what did not pay is tried again once in a while.
    """

    __slots__ = ("right", "tried")

    _PRIOR = 4.0
    _MOST = 50.0

    def __init__(self) -> None:
        self.right = self.tried = 0.0

    def fade(self) -> None:
        self.right *= 0.99
        self.tried *= 0.99

    def learn(self, weight: float, chance: float) -> None:
        """Notes a token that will count with `weight`, and is right with this chance."""
        kept = min(1.0, self._MOST / (self.tried + weight))
        self.tried = (self.tried + weight) * kept
        self.right = (self.right + weight * chance) * kept

    def estimate(self, prior: float) -> float:
        return (self.right + self._PRIOR * prior) / (self.tried + self._PRIOR)


class _Line:
    """What is known of one sequence."""

    __slots__ = ("bought", "rate")

    def __init__(self) -> None:
        self.rate = _Rate()
        self.bought = False  # its prompt is being computed


class _Candidate(NamedTuple):
    """A sequence that the draft model can go on with.

    `chances` are of its first tokens, one after the other; `cheap` are those of other sources.
    """

    number: int
    sequence: Sequence
    line: _Line
    missing: int
    depth: int
    chances: np.ndarray
    cheap: Seq[float]


class Plan(NamedTuple):
    """What pays: `gain` is in tokens a second, beside no draft model."""

    gain: float
    chosen: Seq[_Candidate]


class ModelDrafts:
    """Asks a draft model for chains of tokens, with branches where it is in doubt.

    A step of all sequences together with `d` tokens of drafts takes `T(d)` seconds, and each pass
    of the draft model, which gives each sequence one token more, as long as was measured. It runs
    if that promises more tokens a second than drafts of the other sources do, and goes on as long
    as the next pass is worth its time, by what it gave for the tokens so far.

    A prompt that its tree does not have is computed by it when the text's drafts would have saved
    as much time as that takes (who rents skis buys them after as much rent). So a text that ends
    early costs nothing, and one that goes on at most twice what it had to.
    """

    def __init__(
        self,
        network: DraftNetwork,
        trust: Trust,
        *,
        share: float,
        stretch: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`share`: supposed time of a pass, of a step's; `stretch`: most time that computing
        prompts may add to a step, of the step's."""
        self.network = network
        self._soon = min(_SOON, max(network.most_rows // 2, 1))
        self.passes = PassCosts(share)
        self._trust = trust
        self._stretch = stretch
        self._clock = clock
        self._rate = _Rate()
        self._lines: dict[Sequence, _Line] = {}

    def propose(
        self,
        sequences: Seq[tuple[Sequence, int]],
        cheap: Seq[Seq[float]],
        curve: np.ndarray,
        base: int,
        most: int,
    ) -> dict[int, list[Proposed]]:
        """Tokens for the sequences that get any, by their numbers, in one tree each.

        Args:
            sequences: each with the most tokens that its draft may have.
            cheap: for each, the chances of the tokens that other sources propose.
            curve: seconds of the step with 0, 1, 2, ... tokens of drafts.
            base: tokens of the step without any.
            most: tokens of drafts that it may have.
        """
        self._rate.fade()
        step = float(curve[0])
        fixed, row = self.passes.line(step)
        count = len(sequences)
        if not any(
            (base + all_right) * step
            >= _GAIN * base * (float(curve[all_right]) + depth * (fixed + row))
            for depth in _DEPTHS
            for all_right in (min(count * depth, most),)
        ):
            return {}
        candidates = self._candidates(sequences, cheap)
        if not candidates:
            return {}
        plain = _best([each for own in cheap for each in own], curve, base, most)
        plan = self._plan(candidates, cheap, curve, base, most, plain)
        if plan.gain < _GAIN:
            return {}
        ready = [each for each in candidates if each.missing <= self._soon]
        pieces = self._pieces(plan, step, base, row)
        if len(ready) < len(candidates):
            plan = self._plan(ready, cheap, curve, base, most, plain)
        chosen = plan.chosen if plan.gain >= _GAIN else ()
        if not chosen and not pieces:
            return {}
        return self._draft(chosen, pieces, curve, base, most)

    def _candidates(
        self, sequences: Seq[tuple[Sequence, int]], cheap: Seq[Seq[float]]
    ) -> list[_Candidate]:
        prior = self._rate.estimate(0.7)
        found = []
        for number, (sequence, room) in enumerate(sequences):
            begun = self.network.begin(sequence)
            if begun is None or (depth := min(room, begun.room, DEEPEST)) < 1:
                continue
            line = self._lines.get(sequence)
            if line is None:
                line = self._lines[sequence] = _Line()
            line.rate.fade()
            rate = line.rate.estimate(prior)
            chances = rate ** np.arange(1, depth + 1)
            found.append(
                _Candidate(number, sequence, line, begun.missing, depth, chances, cheap[number])
            )
        return found

    def _plan(
        self,
        candidates: Seq[_Candidate],
        cheap: Seq[Seq[float]],
        curve: np.ndarray,
        base: int,
        most: int,
        plain: float,
    ) -> Plan:
        """The best depth, and the sequences that it pays for, as if all were computed so far."""
        fixed, row = self.passes.line(float(curve[0]))
        worth = float(curve[0]) / base
        best = Plan(0.0, ())
        for depth in _DEPTHS:
            chosen = [
                each
                for each in candidates
                if (expected := float(each.chances[:depth].sum())) > sum(each.cheap)
                and expected * worth > min(depth, each.depth) * row
            ]
            if not chosen:
                continue
            numbers = {each.number for each in chosen}
            chances = [p for number, own in enumerate(cheap) if number not in numbers for p in own]
            for each in chosen:
                chances += each.chances[:depth].tolist()
            passes = max(min(depth, each.depth) for each in chosen)
            rows = sum(min(depth, each.depth) for each in chosen)
            gain = _best(chances, curve, base, most, passes * fixed + rows * row) / plain
            if gain > best.gain:
                best = Plan(gain, chosen)
        return best

    def _pieces(self, plan: Plan, step: float, base: int, row: float) -> list[tuple[Sequence, int]]:
        """Pieces of prompts that are computed in this step, for drafts of later ones."""
        room = max(int(self._stretch * step / max(row, 1e-9)), _LEAST_PIECE)
        room = min(room, self.network.most_rows // 2)
        pieces = []
        saving = step / base * (1 - 1 / plan.gain)  # seconds for each token of a text
        known = self._rate.tried > _Rate._PRIOR
        requests = set()  # siblings hit what the first of them has computed
        for each in sorted(plan.chosen, key=lambda each: each.missing):
            if each.missing <= self._soon or each.sequence.request.request_id in requests:
                continue
            sequence, cost = each.sequence, row * each.missing
            rent = saving if known else min(saving, _UNKNOWN * step / base)
            left = sequence.request.max_length - len(sequence.tokens)
            if not each.line.bought and sequence.num_generated * rent >= cost <= left * saving:
                each.line.bought = True
            if each.line.bought and room > 0:
                # All but the last: its logits are for the step in which they are asked for.
                piece = min(each.missing - 1, room)
                pieces.append((sequence, piece))
                requests.add(sequence.request.request_id)
                room -= piece
        return pieces

    def _draft(
        self,
        chosen: Seq[_Candidate],
        pieces: list[tuple[Sequence, int]],
        curve: np.ndarray,
        base: int,
        most: int,
    ) -> dict[int, list[Proposed]]:
        """Runs the draft model as long as the next pass pays."""
        room = self.network.most_rows - sum(count for _, count in pieces)
        live: list[tuple[_Candidate, int, float]] = []  # with the last token's index and chance
        parts = []
        for each in chosen:
            if each.missing <= room:
                room -= each.missing
                live.append((each, -1, 1.0))
                parts.append((each.sequence, each.missing))
        made: dict[int, list[Proposed]] = {}
        if not parts and not pieces:
            return made
        prior = self._rate.estimate(0.7)
        worth, drafted, depth = float(curve[0]) / base, 0, 0
        guesses = self._run(parts + pieces)[: len(parts)]
        while True:
            depth += 1
            going: list[tuple[_Candidate, int, float]] = []
            for (each, parent, chance), guess in zip(live, guesses, strict=True):
                if guess is None:
                    continue
                tree = made.setdefault(each.number, [])
                place = len(tree)
                alone = self._enter(tree, each, guess, parent, chance)
                drafted += 1
                if depth < each.depth and self.network.append(each.sequence, guess.token):
                    going.append((each, place, chance * alone))
            fixed, row = self.passes.line(float(curve[0]))
            end = min(drafted, most, len(curve) - 1)
            last = min(drafted + len(going), most, len(curve) - 1)
            slope = float(curve[last] - curve[end]) / max(last - end, 1)
            gains = [
                chance * each.line.rate.estimate(prior) * worth - row - slope
                for each, _, chance in going
            ]
            live = [each for each, gain in zip(going, gains, strict=True) if gain > 0]
            if last == end or sum(gain for gain in gains if gain > 0) <= fixed:
                return made
            guesses = self._run([(each.sequence, 1) for each, _, _ in live])

    def _enter(
        self, tree: list[Proposed], each: _Candidate, guess: Guess, parent: int, chance: float
    ) -> float:
        """Enters a guess in a tree; returns the chance that it is right if its parent is."""
        sampled = 0 if each.sequence.request.params.greedy else _SAMPLED
        kind = SOURCE, _confidence(guess.probability) + sampled
        first = 0.1 + 0.85 * guess.probability
        alone = self._trust.probability(kind, first)
        tree.append(Proposed(guess.token, parent, kind, first))
        for token, probability in guess.others:
            beside = SOURCE, _confidence(probability) + sampled + _BESIDE
            first = 0.5 * probability
            if chance * self._trust.probability(beside, first) >= _LEAST:
                tree.append(Proposed(token, parent, beside, first))
        each.line.rate.learn(chance, alone)
        self._rate.learn(chance, alone)
        return alone

    def _run(self, parts: Seq[tuple[Sequence, int]]) -> list[Guess | None]:
        """A pass of the draft model, whose time is learned."""
        begun = self._clock()
        guesses = self.network.run(parts)
        self.passes.observe(sum(count for _, count in parts), self._clock() - begun)
        return guesses

    def forget(self) -> None:
        """Forgets all text that it has computed."""
        self.network.forget()

    def ended(self, sequence: Sequence) -> None:
        """Leaves a sequence."""
        self._lines.pop(sequence, None)
        self.network.ended(sequence)


def _best(
    chances: list[float], curve: np.ndarray, base: int, most: int, more: float = 0.0
) -> float:
    """The most tokens a second with drafts of tokens with these chances; `more`: seconds."""
    chosen = np.sort(np.array(chances, np.float64))[::-1][:most]
    tokens = base + np.concatenate(([0.0], np.cumsum(chosen)))
    return float((tokens / (curve[: len(tokens)] + more)).max())


def _confidence(probability: float) -> int:
    """The same number for probabilities that are about as high, finer towards 0 and 1."""
    bounded = min(max(probability, 1e-4), 1 - 1e-4)
    place = np.log(bounded / (1 - bounded)) / 2 + _CONFIDENCES / 2
    return int(min(max(place, 0), _CONFIDENCES - 1))
