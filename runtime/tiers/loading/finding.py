"""Asks tiers what they have of a prompt, one after another, in a thread for each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

from coppice.radix.mirror.names import PageKey, Salt, chain
from coppice.radix.tokens import TOKEN_BYTES
from coppice.runtime.tiers.loading.load import FoundPage, Load
from coppice.runtime.tiers.store import Store, TierFailed

logger = logging.getLogger(__name__)


class _Question(NamedTuple):
    """What a tier is asked for a load: the pages of a prompt, and the thread's task."""

    root: bytes
    tokens: bytes
    task: Future[None]


class Finding:
    """The questions of one engine's loads.

    Its threads touch the stores and, while one is asked for a load, what that load says of this:
    `asking`, `asked`, `answered` and `missed`.

    A tier that does not answer holds up its own thread, and nobody else: `leave` has all that it
    was asked asked of the tiers after it. It is not asked again before its thread has come back.

    Attributes:
        threads: of each tier one, so that none waits for another.
    """

    def __init__(
        self,
        stores: Seq[Store],
        *,
        page_size: int,
        salt: Salt | None,
        awake: Callable[[int], bool],
        failed: Callable[[int], None],
        found: Callable[[Load, dict[int, FoundPage]], None],
        done: SimpleQueue[Callable[[], None]],
        clock: Callable[[], float],
    ) -> None:
        """Asks nothing yet.

        Args:
            stores: the tiers, the fastest first.
            page_size: tokens of a page.
            salt: see `Loads`.
            awake: whether a tier, by its index, is not to be left alone. Called in any thread.
            failed: notes that a tier could not answer.
            found: takes what all tiers have of a load's prompt, by index of the page.
            done: gets the calls of the last two, for the engine's thread.
            clock: seconds, which never go back.
        """
        self._stores, self._size, self._salt = stores, page_size, salt
        self._awake, self._failed, self._found = awake, failed, found
        self._done, self._clock = done, clock
        self._answered = [0.0 for _ in stores]  # when each has last answered
        # Of each tier: what it is asked; the load whose question its thread was left with.
        self._questions: list[dict[Load, _Question]] = [{} for _ in stores]
        self._stuck: list[Load | None] = [None for _ in stores]
        self._lock = threading.Lock()  # of these two, and of what a load says of its question
        self.threads = [ThreadPoolExecutor(1, f"coppice-{store.name}-find") for store in stores]

    def awake(self, tier: int) -> bool:
        """Whether a tier may be asked now."""
        return self._stuck[tier] is None and self._awake(tier)

    def ask(self, load: Load, root: bytes, tokens: bytes) -> None:
        """Has the first tier that is awake asked for the pages of a prompt.

        Then those after it are asked for what it does not have.
        """
        with self._lock:
            self._ask(load, root, tokens, 0)

    def _ask(self, load: Load, root: bytes, tokens: bytes, tier: int) -> None:
        """Has a tier asked, or the first one after it that is awake. Call it with the lock."""
        while tier < len(self._stores) and not self.awake(tier):
            tier += 1
        load.asking = tier
        if tier < len(self._stores):
            load.asked = self._clock()
            task = self.threads[tier].submit(self._find, load, root, tokens, tier)
            self._questions[tier][load] = _Question(root, tokens, task)
        else:
            pages = load.answered
            self._done.put(lambda: self._found(load, pages))

    def silent(self, load: Load) -> tuple[int, float]:
        """The tier that is asked for a load, and seconds for which it has answered nobody.

        0 seconds, and any tier, if all were asked.
        """
        with self._lock:
            tier, asked = load.asking, load.asked
        if tier == len(self._stores):
            return 0, 0.0
        return tier, self._clock() - max(asked, self._answered[tier])

    def leave(self, tier: int) -> int:
        """Has the tiers after one asked for all that it has not answered; returns how much.

        Call it once `awake` says that the tier is to be left alone.
        """
        with self._lock:
            left, self._questions[tier] = self._questions[tier], {}
            for load, question in left.items():
                if not question.task.cancel():
                    self._stuck[tier] = load
                self._ask(load, question.root, question.tokens, tier + 1)
        return len(left)

    def close(self) -> None:
        """Ends the threads once they have done what they do."""
        for threads in self.threads:
            threads.shutdown(cancel_futures=True)

    # -- in threads --------------------------------------------------------------------------

    def _find(self, load: Load, root: bytes, tokens: bytes, tier: int) -> None:
        """Finds what a tier has of a prompt and those before it do not; then asks the next one."""
        first, pages, missed = load.begin // self._size, dict(load.answered), list[bytes]()
        try:
            if load.finding:  # else its sequence has ended
                keys = chain(root, tokens, self._size * TOKEN_BYTES, self._salt)
                missing = [
                    index for index in range(first, len(keys))
                    if index not in pages or pages[index].key.length < keys[index].length
                ]  # fmt: skip
                places = self._stores[tier].find([keys[index] for index in missing])
                for index, place in zip(missing, places, strict=True):
                    if place is None:
                        missed.append(keys[index].name)
                    else:
                        pages[index] = FoundPage(tier, keys[index], place)
                pages = self._with_part(tier, keys, first, pages)
        except TierFailed as error:
            logger.warning("%s", error)
            self._done.put(lambda: self._failed(tier))
        except BaseException:  # whatever ends this thread's work, the sequence goes on
            logger.exception("a tier could not be asked")
            self._done.put(lambda: self._failed(tier))
        with self._lock:
            self._answered[tier] = self._clock()
            if self._stuck[tier] is load:
                self._stuck[tier] = None
            # If it is not asked this any more it was left meanwhile, and others were asked then.
            if self._questions[tier].pop(load, None) is not None and load.finding:
                load.answered = pages
                load.missed += missed
                self._ask(load, root, tokens, tier + 1)

    def _with_part(
        self, tier: int, keys: Seq[PageKey], first: int, pages: dict[int, FoundPage]
    ) -> dict[int, FoundPage]:
        """Adds a page of which only the first tokens agree, after the last one that is whole."""
        whole = {at: page for at, page in pages.items() if page.key.length == keys[at].length}
        index = max(whole, default=first - 1) + 1
        if index == len(keys):
            return whole
        key, part = keys[index], pages.get(index)
        place = self._stores[tier].find_longest(key)
        if place is not None and (part is None or place.tokens > part.place.tokens):
            agreed = PageKey(key.parent, key.tokens[: place.tokens * TOKEN_BYTES])
            part = FoundPage(tier, agreed, place)
        return whole if part is None else whole | {index: part}
