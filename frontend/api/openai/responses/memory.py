"""The responses that the server remembers, so that later ones continue them by their id."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json

from coppice.frontend.http.json_answers import in_parts

Json = dict[str, Any]

MOST_RESPONSES = 10_000  # that can be found, of one owner
_OVERHEAD = 1024  # bytes that a response takes beside its JSON


@dataclass(slots=True, eq=False)
class Remembered:
    """A response that is kept, for itself or because a later one continues it.

    Attributes:
        body: the response as JSON.
        input: its own input items as JSON, without those of the response that it continues.
        output: its output items as JSON, without their logprobs; None: as `body` has them. A
            conversation goes on without logprobs, which may be a hundred times its text.
        before: the response that it continues.
        whole: bytes of what is read to continue it.
        item_ids: of its input and output items.
        holders: 1 while it can be found by its id, and 1 for each response that continues it.
        used: when it was last asked for.
    """

    body: bytes
    input: bytes
    output: bytes | None
    before: Remembered | None
    item_ids: tuple[str, ...]
    used: float
    whole: int
    holders: int = 0

    @property
    def size(self) -> int:
        """Bytes that it counts for."""
        return len(self.body) + len(self.input) + len(self.output or b"") + _OVERHEAD

    def output_items(self) -> list[Json]:
        """The items with which it answers, without logprobs."""
        items: list[Json]
        items = from_json(self.body)["output"] if self.output is None else from_json(self.output)
        return items

    def own_items(self) -> dict[str, Json]:
        """The items of its own input and output, by id."""
        return {item["id"]: item for item in (*from_json(self.input), *self.output_items())}

    def conversation(self) -> list[Json]:
        """All items up to the end of this response, those that it continues included."""
        return [*self.input_items(), *self.output_items()]

    def input_items(self) -> list[Json]:
        """The items that the response answers, also of those that it continues."""
        chain: list[Remembered] = []
        place: Remembered | None = self
        while place is not None:
            chain.append(place)
            place = place.before
        items: list[Json] = []
        for each in reversed(chain):
            items += from_json(each.input)
            if each is not self:
                items += each.output_items()
        return items


@dataclass(slots=True)
class _Shelf:
    """The responses of one owner, the one that was not used for longest first."""

    found: OrderedDict[str, Remembered] = field(default_factory=OrderedDict)
    items: dict[str, list[Remembered]] = field(default_factory=dict)  # who has an item of that id
    size: int = 0


class ResponseMemory:
    """Keeps the latest responses of each owner, who alone may read, continue and delete them.

    Any thread may use it.

    Args:
        most_bytes: most bytes that the responses of one owner take; 0: nothing is kept.
        ttl: seconds without use after which a response is forgotten.
        clock: returns the time in seconds.

    Attributes:
        most_bytes: as given.
    """

    def __init__(
        self, most_bytes: int, ttl: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most_bytes = most_bytes
        self._ttl = ttl
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}
        self._lock = threading.Lock()

    def get(self, owner: str, response_id: str) -> Remembered | None:
        """The response of that id; None if it is not, or no longer, remembered."""
        with self._lock:
            shelf = self._shelf(owner)
            found = shelf.found.get(response_id)
            if found is not None:
                found.used = self._clock()
                shelf.found.move_to_end(response_id)
            return found

    def holder(self, owner: str, item_id: str) -> Remembered | None:
        """A response, of any that is kept, with an item of that id."""
        with self._lock:
            holders = self._shelf(owner).items.get(item_id)
            return None if holders is None else holders[-1]

    def put(
        self,
        owner: str,
        response: Mapping[str, Any],
        input_items: Sequence[Mapping[str, Any]],
        before: Remembered | None,
    ) -> None:
        """Remembers a response; forgets what was not used for longest if that is too much.

        A response that takes more than all of the memory is not remembered.
        """
        ids = tuple(item["id"] for item in (*input_items, *response["output"]))
        own, output = to_json(input_items), None
        if any(part.get("logprobs") for part in _parts(response["output"])):
            output = to_json(list(map(_without_logprobs, response["output"])))
        written = to_json(response) if output is None else in_parts(response)
        whole = len(own) + len(written if output is None else output)
        whole += 0 if before is None else before.whole
        kept = Remembered(written, own, output, before, ids, self._clock(), whole)
        with self._lock:
            shelf = self._shelf(owner)
            if kept.size > self.most_bytes:
                return
            _hold(shelf, kept)
            shelf.found[response["id"]] = kept
            while shelf.found and (
                shelf.size > self.most_bytes or len(shelf.found) > MOST_RESPONSES
            ):
                _forget(shelf, next(iter(shelf.found)))

    def delete(self, owner: str, response_id: str) -> bool:
        """Forgets a response; those that continue it keep their conversation.

        Returns False if it is not remembered.
        """
        with self._lock:
            shelf = self._shelf(owner)
            if response_id not in shelf.found:
                return False
            _forget(shelf, response_id)
            return True

    def _shelf(self, owner: str) -> _Shelf:
        """The owner's responses, after those whose time has passed were forgotten."""
        shelf = self._shelves.setdefault(owner, _Shelf())
        oldest = self._clock() - self._ttl
        while shelf.found:
            name, first = next(iter(shelf.found.items()))
            if first.used > oldest:
                break
            _forget(shelf, name)
        return shelf


def _parts(items: Iterable[Json]) -> Iterator[Json]:
    """The parts of which items consist."""
    for item in items:
        yield from item.get("content") or ()


def _without_logprobs(item: Json) -> Json:
    if not any(part.get("logprobs") for part in _parts([item])):
        return item
    content = [part | {"logprobs": []} if "logprobs" in part else part for part in item["content"]]
    return item | {"content": content}


def _hold(shelf: _Shelf, place: Remembered | None) -> None:
    """Counts one holder more of a response; of one that was forgotten, its memory again, too."""
    while place is not None:
        place.holders += 1
        if place.holders > 1:
            break
        shelf.size += place.size
        for name in place.item_ids:
            shelf.items.setdefault(name, []).append(place)
        place = place.before


def _forget(shelf: _Shelf, response_id: str) -> None:
    """Lets a response be found no more; what no other one continues gives its memory back."""
    place: Remembered | None = shelf.found.pop(response_id)
    while place is not None:
        place.holders -= 1
        if place.holders:
            break
        shelf.size -= place.size
        for name in place.item_ids:
            holders = shelf.items[name]
            holders.remove(place)
            if not holders:
                del shelf.items[name]
        place = place.before
