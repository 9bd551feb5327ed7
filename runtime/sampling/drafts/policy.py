"""How wide and how deep the drafts of a step are: as wide and as deep as pays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from coppice.runtime.requests.request import Sequence
from coppice.runtime.sampling.drafts.budget import AskingBudget
from coppice.runtime.sampling.drafts.costs import StepCosts
from coppice.runtime.sampling.drafts.counts import SpeculationCounts
from coppice.runtime.sampling.drafts.draft import NOTHING, Draft, DraftToken
from coppice.runtime.sampling.drafts.modelled import SOURCE as MODEL
from coppice.runtime.sampling.drafts.modelled import ModelDrafts
from coppice.runtime.sampling.drafts.network import DraftNetwork
from coppice.runtime.sampling.drafts.source import DraftSource, Proposed
from coppice.runtime.sampling.drafts.trust import Luck, Trust

logger = logging.getLogger(__name__)

_GAIN = 1.03  # the least that a step must promise: estimates are not more exact
_SURE = 0.995  # no draft is likelier: a chain of any length would pay
_FEW = 4  # tokens that each sequence may be asked for, however many there are
_SPARE = 4  # times the tokens that each would get of a step's, if all got as many
_LEAST = 0.02  # tokens less likely than this are left out
# Steps with drafts after which one has none, so that its time stays known: so many where drafts
# promise to double what a step yields, fewer where they promise less: then that time matters more.
_PLAIN = 128
_LEAST_PLAIN = 8
_LEFT_OUT = -2  # in place of a token's index
_LONGEST_WAIT = 64  # steps until a sequence is asked again whose text nothing foretells
_LONGEST_PAUSE = 24  # the same where something is foretold, and does not pay
_COSTLY = 4  # steps for which nothing is asked where no draft could pay


class _Node(NamedTuple):
    """A token that may be drafted: with `chance` of being accepted, as is all before it."""

    token: int
    parent: int
    kind: tuple[str, int]
    chance: float
    alone: float  # the same, where all before it is accepted


class _State:
    """What the policy knows about one sequence."""

    __slots__ = ("added", "length", "luck", "next", "nodes", "pays", "unpaid", "useless", "worth")

    def __init__(self) -> None:
        self.luck = Luck()
        self.useless = 0  # times in a row that it was asked, and got nothing
        self.unpaid = 0  # times in a row that it got proposals, and none was taken
        self.next = 0  # the step in which it is asked again
        self.pays = False  # whether something was taken of what it got last
        self.nodes: list[_Node] = []  # what was proposed last, drafted or not
        self.length = 0  # of the sequence then
        self.added = 0.0  # seconds that each token of its draft adds to its step
        self.worth = 0.0  # seconds that each accepted one saves


class TreeSpeculation:
    """Drafts of all sources, of which a step gets those that make it yield more tokens a second.

    A step of `n` tokens takes `T(d)` seconds with `d` drafted ones beside them, and yields `n` and
    each drafted one by its chance of being accepted. The likeliest tokens of all sequences are
    taken, as many as give the most tokens a second. Both sides are learned: chances from what
    followed on what was proposed, by kind of draft and by sequence, and `T` from the steps. With
    many sequences a row costs about what a token is worth, and no draft is made, or asked for.

    What was proposed and did not pay is compared, too: a kind or a sequence that was wrong for a
    while would not be drafted any more, and so never be known to be right again.
    """

    def __init__(
        self,
        sources: Seq[DraftSource],
        most: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`most` is the greatest number of tokens of a sequence's draft."""
        self.costs = StepCosts()
        self.budget = AskingBudget()
        self.counts = SpeculationCounts()
        self.model: ModelDrafts | None = None
        self._modelling = 0.0  # seconds of this step that the draft model took
        self._sources = sources
        self._most = most
        self._clock = clock
        self._trust = Trust()
        self._states: dict[Sequence, _State] = {}
        self._limits: dict[int, tuple[np.ndarray, int]] = {}  # `_paying`, and of which curve
        self._promised: dict[int, float] = {}  # by tokens of a step, times those without drafts
        self._step = 0  # number of the step that asks
        # The step in which one of so many sequences is asked again.
        self._quiet = 0, 0

    def use_model(self, network: DraftNetwork, *, share: float, stretch: float = 1.0) -> None:
        """Takes drafts from a draft model, too; arguments as of `ModelDrafts`."""
        self.model = ModelDrafts(
            network, self._trust, share=share, stretch=stretch, clock=self._clock
        )

    def skips(self, sequences: int) -> bool:
        """As `Speculation.skips`."""
        skipped = self._step + 1 < self._quiet[0] and sequences == self._quiet[1]
        if skipped:
            self._step += 1
            self._modelling = 0.0
        return skipped

    def propose(self, sequences: Seq[tuple[Sequence, int]], rows: int) -> list[Draft]:
        """As `Speculation.propose`. O(sequences * tokens of their drafts)."""
        nothing = [NOTHING] * len(sequences)
        self._step += 1
        self._modelling = 0.0
        base = len(sequences) + rows
        curve = self.costs.curve(base)
        if curve is None or self.costs.drafting(base) >= self._plain_after(base):
            return nothing
        most = min(self._paying(curve, base), sum(min(each, self._most) for _, each in sequences))
        if most < 1:
            self._quiet = self._step + _COSTLY, len(sequences)
            return nothing
        begun = self._clock()
        states = [self._state(sequence) for sequence, _ in sequences]
        asked, doubtful = self._choose(states)
        if not asked and self.model is None:
            self._rest(states, float(curve[0]))
            return nothing
        each_most = min(self._most, max(_FEW, _SPARE * most // len(sequences)))
        nodes: list[list[_Node]] = [[] for _ in sequences]
        for number in asked:
            sequence, room = sequences[number]
            self._judge(sequence, states[number])
            nodes[number] = self._nodes(sequence, states[number], min(room, each_most))
            self._bide(states[number], nodes[number], curve[0] / base)
        if self.model is not None:
            self._ask_model(self.model, sequences, nodes, curve, base, most)
        for (sequence, _), state, made in zip(sequences, states, nodes, strict=True):
            if made:
                self._judge(sequence, state)  # of who was not asked, but the draft model was
                state.nodes, state.length = made, len(sequence.tokens)
        taken = self._take(sequences, nodes, curve, base, most)
        self._pause([(states[number], nodes[number], taken[number]) for number in asked])
        count = sum(map(len, taken))
        if asked:
            seconds = self._clock() - begun - self._modelling
            self.budget.asked(len(asked), doubtful, seconds)
        if not count:
            if self.model is None:
                self._rest(states, float(curve[0]))
            return nothing
        added, worth = float(curve[count] - curve[0]) / count, float(curve[0]) / base
        return [
            self._draft(state, made, chosen, added, worth) if chosen else NOTHING
            for state, made, chosen in zip(states, nodes, taken, strict=True)
        ]

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = _State()
        return state

    def _choose(self, states: Seq[_State]) -> tuple[list[int], int]:
        """Whom to ask, and how many of them have to be paid by the budget.

        Those whose last draft has paid are always asked; of the others those that have waited
        longest, as many as may be.
        """
        due = [number for number, state in enumerate(states) if state.next <= self._step]
        doubtful = [number for number in due if not states[number].pays]
        allowed = self.budget.allowed
        if len(doubtful) > allowed:
            doubtful.sort(key=lambda number: states[number].next)
            left_out = set(doubtful[allowed:])
            due = [number for number in due if number not in left_out]
            return due, allowed
        return due, len(doubtful)

    def _take(
        self,
        sequences: Seq[tuple[Sequence, int]],
        nodes: list[list[_Node]],
        curve: np.ndarray,
        base: int,
        most: int,
    ) -> list[list[int]]:
        """The nodes of each sequence, by index, that give the most tokens a second together."""
        taken: list[list[int]] = [[] for _ in sequences]
        found: list[tuple[float, int, int]] = []
        for number, made in enumerate(nodes):
            mine = [(-each.chance, number, at) for at, each in enumerate(made)]
            room = min(sequences[number][1], self._most)
            if len(mine) > room:  # of several sources together
                mine = sorted(mine)[:room]
            found += mine
        if not found:
            return taken
        found.sort()
        del found[most:]
        chances = np.array([0.0, *(-chance for chance, _, _ in found)])
        yields = (base + np.cumsum(chances)) * (curve[0] / base) / curve[: len(chances)]
        count = int(yields.argmax())
        if yields[count] >= _GAIN:
            self._promised[base] = float(yields[count])
            for _, number, at in found[:count]:
                taken[number].append(at)
        return taken

    def _paying(self, curve: np.ndarray, base: int) -> int:
        """The most drafted tokens that would pay if all were accepted; 0: none would."""
        known = self._limits.get(base)
        if known is not None and known[0] is curve:
            return known[1]
        best = (base + np.arange(len(curve))) * (curve[0] / base) / curve
        pays = np.flatnonzero(best >= _GAIN)
        most = int(pays[-1]) if len(pays) else 0
        self._limits[base] = curve, most
        return most

    def _plain_after(self, base: int) -> float:
        """Steps with drafts, of so many tokens, after which one has none."""
        return min(max(_PLAIN * (self._promised.get(base, 2.0) - 1), _LEAST_PLAIN), _PLAIN)

    def _nodes(self, sequence: Sequence, state: _State, most: int) -> list[_Node]:
        """The trees of all sources as one; a token that several propose is the likeliest one's."""
        nodes: list[_Node] = []
        factor = state.luck.factor
        for source in self._sources:
            if proposed := source.propose(sequence, most):
                self._merge(nodes, proposed, factor)
        return nodes

    def _merge(self, nodes: list[_Node], proposed: Seq[Proposed], factor: float) -> None:
        """Adds the tree of a source, of whose first tokens the chances are multiplied."""
        trust = self._trust.probability
        places: dict[tuple[int, int], int] | None = None
        if nodes:  # few have drafts of two sources
            places = {(node.parent, node.token): at for at, node in enumerate(nodes)}
        at: list[int] = []
        for token, parent, kind, first in proposed:
            place = _LEFT_OUT
            if parent < 0 or (parent := at[parent]) >= 0:
                alone = trust(kind, first)
                chance = alone * (factor if parent < 0 else nodes[parent].chance)
                if chance > _SURE:
                    chance = _SURE
                node = _Node(token, parent, kind, chance, alone)
                known = None if places is None else places.get((parent, token))
                if known is not None:
                    place = known
                    if chance > nodes[place].chance:
                        nodes[place] = node
                elif chance >= _LEAST or parent < 0:  # first tokens are judged, however unlikely
                    place = len(nodes)
                    nodes.append(node)
                    if places is not None:
                        places[parent, token] = place
            at.append(place)

    def _ask_model(
        self,
        model: ModelDrafts,
        sequences: Seq[tuple[Sequence, int]],
        nodes: list[list[_Node]],
        curve: np.ndarray,
        base: int,
        most: int,
    ) -> None:
        """Adds what the draft model proposes. If it fails it is not asked again: texts go on."""
        begun = self._clock()
        asked = [(sequence, min(room, self._most)) for sequence, room in sequences]
        chances = [[each.chance for each in made] for made in nodes]
        try:
            proposed = model.propose(asked, chances, curve, base, most)
        except BaseException as error:
            # What it had begun is not in its pages.
            model.forget()
            if not isinstance(error, Exception):
                raise
            logger.exception("the draft model failed, and is not asked any more")
            self.model = None
            return
        for number, tree in proposed.items():
            self._merge(nodes[number], tree, 1.0)
        self._modelling = self._clock() - begun
        self.counts.of(MODEL).seconds_saved -= self._modelling

    def _bide(self, state: _State, made: list[_Node], worth: float) -> None:
        """Lets a sequence wait that costs more time to ask than its drafts can save."""
        saves = sum(each.chance for each in made) * worth
        if saves > 2 * self.budget.each or not self.budget.scarce:
            state.useless = 0
        else:
            state.useless += 1
            state.next = self._step + min(1 << min(state.useless, 10), _LONGEST_WAIT)

    def _pause(self, asked: Seq[tuple[_State, list[_Node], list[int]]]) -> None:
        """Lets sequences wait of whose proposals none was taken, if asking takes time."""
        for state, made, chosen in asked:
            state.pays = bool(chosen)
            if made:
                state.unpaid = 0 if chosen or not self.budget.scarce else state.unpaid + 1
                if state.unpaid > 1 and state.next <= self._step:
                    state.next = self._step + min(1 << min(state.unpaid - 1, 10), _LONGEST_PAUSE)

    def _rest(self, states: Seq[_State], seconds: float) -> None:
        """Notes until when none of these is asked, if none ends before; a step takes `seconds`."""
        begin = min(state.next for state in states)
        lacking = self._step + self.budget.wait(len(states), seconds)
        self._quiet = max(begin, lacking), len(states)

    def _draft(
        self,
        state: _State,
        made: list[_Node],
        chosen: list[int],
        added: float,
        worth: float,
    ) -> Draft:
        """The draft of the nodes at the indices `chosen`, in which parents come first."""
        state.added, state.worth = added, worth
        new = {-1: -1}
        tokens: list[DraftToken] = []
        for at in chosen:
            node = made[at]
            parent, new[at] = new[node.parent], len(tokens)
            tokens.append(DraftToken(node.token, parent, node.alone, node.kind[0]))
        return Draft(tuple(tokens))

    def verified(self, sequence: Sequence, draft: Draft, path: Seq[int]) -> None:
        """As `Speculation.verified`."""
        state = self._states.get(sequence)
        sequence.drafted += len(draft)
        sequence.accepted += len(path)
        if state is None:
            return
        self.budget.saved(len(path) * state.worth - len(draft) * state.added)
        accepted = set(path)
        for index, each in enumerate(draft.tokens):
            counts = self.counts.of(each.source)
            counts.drafted += 1
            counts.seconds_saved -= state.added
            if index in accepted:
                counts.accepted += 1
                counts.seconds_saved += state.worth

    def _judge(self, sequence: Sequence, state: _State) -> None:
        """Learns from what was proposed last, whether it was drafted or not: by now it is known
        what followed. O(nodes)."""
        made, tokens, begin = state.nodes, sequence.tokens, state.length
        state.nodes = []
        if not made or len(tokens) <= begin:
            return
        learn = self._trust.learn
        places = {-1: begin}  # of what follows each token that came, in the text
        expected, hit, other = 0.0, False, False
        for at, (token, parent, kind, _, alone) in enumerate(made):
            place = places.get(parent)
            if place is None or place >= len(tokens):
                continue
            came = token == tokens[place]
            if came:
                places[at] = place + 1
            learn(kind, came)
            if parent < 0 and kind[0] != MODEL:
                other = True
                expected += alone
                hit = hit or came
        if other:
            state.luck.learn(min(expected, 1.0), hit)

    def stepped(self, sequences: int, drafted: int, rows: int, seconds: float) -> None:
        """As `Speculation.stepped`."""
        self.counts.rows += sequences
        seconds = max(seconds - self._modelling, 0.1 * seconds)
        self._modelling = 0.0
        self.budget.stepped(seconds)
        self.costs.observe(sequences + rows, drafted, seconds)

    def forget(self) -> None:
        """Forgets all text."""
        for source in self._sources:
            source.forget()
        if self.model is not None:
            self.model.forget()

    def forget_adapter(self, identity: str, mark: int | None) -> None:
        """Forgets the text of an adapter; arguments as of `DraftSource.forget_adapter`."""
        for source in self._sources:
            source.forget_adapter(identity, mark)

    def ended(self, sequence: Sequence) -> None:
        """As `Speculation.ended`."""
        state = self._states.pop(sequence, None)
        if state is not None:
            self._judge(sequence, state)
        self._quiet = 0, 0
        for source in self._sources:
            source.ended(sequence)
        if self.model is not None:
            self.model.ended(sequence)
