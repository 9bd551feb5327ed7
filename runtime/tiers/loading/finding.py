"""Asks tiers what they have of a prompt, one after another, in a thread for each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from coppice.radix.mirror.names import PageKey, Salt, chain
from coppice.radix.tokens import TOKEN_BYTES
from coppice.runtime.tiers.loading.load import FoundPage, Load
from coppice.runtime.tiers.store import Store, TierFailed

logger = logging.getLogger(__name__)


class Finding:
    """The questions of one engine's loads.

    Its threads touch the stores and, while one is asked for a load, what that load says of this:
    `asking`, `asked`, `answered` and `missed`.

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
            awake: whether a tier, by its index, may be asked now. Called in any thread.
            failed: notes that a tier could not answer.
            found: takes what all tiers have of a load's prompt, by index of the page.
            done: gets the calls of the last two, for the engine's thread.
            clock: seconds, which never go back.
        """
        self._stores, self._size, self._salt = stores, page_size, salt
        self._awake, self._failed, self._found = awake, failed, found
        self._done, self._clock = done, clock
        self._answered = [0.0 for _ in stores]  # when each has last answered
        self.threads = [ThreadPoolExecutor(1, f"coppice-{store.name}-find") for store in stores]

    def ask(self, load: Load, root: bytes, tokens: bytes, tier: int = 0) -> None:
        """Has a tier asked for the pages of a prompt, or the first one after it that is awake.

        Then those after it are asked for what it does not have.
        """
        while tier < len(self._stores) and not self._awake(tier):
            tier += 1
        if tier < len(self._stores):
            load.asking, load.asked = tier, self._clock()
            self.threads[tier].submit(self._find, load, root, tokens, tier)
        else:
            pages = load.answered
            self._done.put(lambda: self._found(load, pages))

    def silent(self, load: Load) -> float:
        """Seconds for which the tier that is asked for a load has answered nobody."""
        return self._clock() - max(load.asked, self._answered[load.asking])

    def close(self) -> None:
        """Ends the threads once they have done what they do."""
        for threads in self.threads:
            threads.shutdown(cancel_futures=True)

    # -- in threads --------------------------------------------------------------------------

    def _find(self, load: Load, root: bytes, tokens: bytes, tier: int) -> None:
        """Finds what a tier has of a prompt and those before it do not; then asks the next one."""
        if not load.finding:
            return
        first, pages = load.begin // self._size, dict(load.answered)
        try:
            keys = chain(root, tokens, self._size * TOKEN_BYTES, self._salt)
            missing = [
                index for index in range(first, len(keys))
                if index not in pages or pages[index].key.length < keys[index].length
            ]  # fmt: skip
            places = self._stores[tier].find([keys[index] for index in missing])
            load.missed += [
                keys[index].name
                for index, place in zip(missing, places, strict=True)
                if place is None
            ]
            for index, place in zip(missing, places, strict=True):
                if place is not None:
                    pages[index] = FoundPage(tier, keys[index], place)
            load.answered = pages
            load.answered = self._with_part(tier, keys, first, pages)
        except TierFailed as error:
            logger.warning("%s", error)
            self._done.put(lambda: self._failed(tier))
        except BaseException:  # whatever ends this thread's work, the sequence goes on
            logger.exception("a tier could not be asked")
        self._answered[tier] = self._clock()
        self.ask(load, root, tokens, tier + 1)

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
