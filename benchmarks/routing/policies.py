"""Our router in the simulation, and the rules of others as their sources describe them."""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence

from coppice.frontend.router.choosing.policy import Router
from coppice.radix.mirror.changes import Change
from coppice.radix.tokens import common_prefix
from routing.workloads import TOKEN_BYTES, Work

_BLOCK = 64 * TOKEN_BYTES  # of the approximate trees of the others, which are trees of characters


class Counting:
    """Counts the requests that each replica has not finished."""

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self.load = [0] * replicas
        self.rng = rng
        self._place: dict[str, int] = {}

    def choose(self, name: str, work: Work, now: float) -> int:
        place = self._place[name] = self.pick(work)
        self.load[place] += 1
        return place

    def pick(self, work: Work) -> int:
        raise NotImplementedError

    def began(self, name: str, now: float) -> None:
        pass

    def ended(self, name: str, now: float) -> None:
        self.load[self._place.pop(name)] -= 1

    def changed(self, replica: int, changes: Sequence[Change]) -> None:
        pass

    def held(self, work: Work) -> int:
        return 0

    def least(self) -> int:
        low = min(self.load)
        return self.rng.choice([n for n, load in enumerate(self.load) if load == low])

    def better_of_two(self) -> int:
        one, two = (self.rng.randrange(len(self.load)) for _ in range(2))
        return one if self.load[one] <= self.load[two] else two


class Random(Counting):
    def pick(self, work: Work) -> int:
        return self.rng.randrange(len(self.load))


class RoundRobin(Counting):
    turn = -1

    def pick(self, work: Work) -> int:
        self.turn += 1
        return self.turn % len(self.load)


class LeastLoad(Counting):
    def pick(self, work: Work) -> int:
        return self.least()


class PowerOfTwo(Counting):
    def pick(self, work: Work) -> int:
        return self.better_of_two()


class ConsistentHashing(Counting):
    """By the first 256 tokens, as by a session or a prefix."""

    def pick(self, work: Work) -> int:
        key = hashlib.blake2b(work.prompt[: 256 * TOKEN_BYTES], digest_size=8).digest()
        # Highest random weight: as a ring with very many points.
        best = [hashlib.blake2b(key + bytes([n % 256, n // 256]), digest_size=8).digest()
                for n in range(len(self.load))]  # fmt: skip
        return best.index(max(best))


class Guessed(Counting):
    """What routers know that guess caches from their own traffic: blocks that they have sent."""

    def __init__(self, replicas: int, rng: random.Random, most: int) -> None:
        super().__init__(replicas, rng)
        self._most = most  # blocks that they believe a replica keeps
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(replicas)]

    def choose(self, name: str, work: Work, now: float) -> int:
        self._keys = self._blocks(work.prompt)
        place = super().choose(name, work, now)
        sent = self._sent[place]
        for key in self._keys:
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self._most:
            sent.popitem(last=False)
        return place

    @staticmethod
    def _blocks(prompt: bytes) -> list[bytes]:
        keys, state = [], hashlib.blake2b(digest_size=8)
        for begin in range(0, len(prompt) - _BLOCK + 1, _BLOCK):
            state.update(prompt[begin : begin + _BLOCK])
            keys.append(state.copy().digest())
        return keys

    def match(self) -> tuple[float, int]:
        """The share of the prompt that the best replica is believed to hold, and that replica."""
        best = (-1, 0)
        for place, sent in enumerate(self._sent):
            length = 0
            while length < len(self._keys) and self._keys[length] in sent:
                length += 1
            best = max(best, (length, -place))
        return best[0] / max(1, len(self._keys)), -best[1]

    def emptiest(self) -> int:
        sizes = [len(sent) for sent in self._sent]
        return sizes.index(min(sizes))


class SglangCacheAware(Guessed):
    """sgl-router's cache_aware: balance thresholds 64 and 1.5, cache threshold 0.3."""

    def pick(self, work: Work) -> int:
        low, high = min(self.load), max(self.load)
        if high - low > 64 and high > 1.5 * low:
            return self.least()
        share, place = self.match()
        return place if share > 0.3 else self.emptiest()


class RayPrefix(Guessed):
    """Ray Serve's PrefixCacheAffinityRouter: imbalance of 10, match rate of 0.1."""

    def pick(self, work: Work) -> int:
        if max(self.load) - min(self.load) > 10:
            return self.better_of_two()
        share, place = self.match()
        return place if share >= 0.1 else self.emptiest()


class Ours:
    """`coppice.frontend.router.choosing.policy`, with the times of its decisions."""

    def __init__(self, replicas: int, places: int, rate: float) -> None:
        self._now = 0.0
        self.router = Router(lambda: self._now)
        self.times: list[float] = []
        for replica in range(replicas):
            self.router.join(replica, places=places)
            self.router.measured(replica, rate)

    def choose(self, name: str, work: Work, now: float) -> int:
        self._now = now
        prompt = work.prompt
        begun = time.perf_counter()
        choice = self.router.choose(prompt)
        self.times.append(time.perf_counter() - begun)
        assert choice is not None
        self.router.send(name, choice, prompt)
        return choice.replica

    def began(self, name: str, now: float) -> None:
        self._now = now
        self.router.began(name)

    def ended(self, name: str, now: float) -> None:
        self._now = now
        self.router.end(name)

    def changed(self, replica: int, changes: Sequence[Change]) -> None:
        self.router.apply(replica, changes)

    def held(self, work: Work) -> int:
        """Tokens of a prompt that the replica holds which holds most of it."""
        return max(self.router.index.hits(work.prompt).values(), default=0)

    @property
    def milliseconds(self) -> float:
        """Of the median decision."""
        return 1e3 * statistics.median(self.times)


__all__ = [
    "ConsistentHashing", "LeastLoad", "Ours", "PowerOfTwo", "Random", "RayPrefix", "RoundRobin",
    "SglangCacheAware", "common_prefix",
]  # fmt: skip
