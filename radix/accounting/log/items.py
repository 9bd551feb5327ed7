"""What is logged besides requests, and the log's items as columns."""

from __future__ import annotations

from array import array

from coppice.radix.accounting.log.account import RequestAccount


class Growth:
    """Tokens that a request has added after its prompt."""

    __slots__ = ("account", "prompt", "added", "time")

    def __init__(self, account: RequestAccount, added: bytes, time: float) -> None:
        self.account = account
        self.prompt = account.prompt
        self.added = added
        self.time = time


class Abandonment:
    """Only the first `computed` tokens of a request's prompt were ever computed."""

    __slots__ = ("account", "tokens", "computed")

    def __init__(self, account: RequestAccount, tokens: bytes, computed: int) -> None:
        self.account = account
        self.tokens = tokens
        self.computed = computed


class Columns:
    """Items as a sample reads them, in order; of one that is no counted prompt `numbers` are 0.

    `numbers` has five for each: tokens of the prompt, its hit tokens, those in flight, its
    `hit_limit`, and the tokens that another replica holds.
    """

    def __init__(self) -> None:
        self.owners: list[RequestAccount] = []
        self.counted: list[int] = []  # which items are requests that the sample counts
        self.texts: list[bytes] = []
        self.begins: list[int] = []  # the first token of each text that was not read before
        self.times: list[float] = []
        self.numbers = array("q")


def columns(items: list[RequestAccount | Growth], serial: int, refreshed: int) -> Columns:
    """The columns of items, of which the first has the number `serial`.

    One of `refreshed` prompts is read anew from its beginning, its hit included.
    """
    made = Columns()
    numbers: list[int] = []
    for at, item in enumerate(items):
        if isinstance(item, RequestAccount):
            account, time = item, item.time
            made.texts.append(item.tokens)
            made.begins.append(item.hit_tokens if (serial + at) % refreshed else 0)
            total = 0
            if item.estimated:
                made.counted.append(at)
                if item.kind == "cross":
                    total = item.prompt_tokens
            numbers.append(total)
            numbers.append(item.hit_tokens if total else 0)
            numbers.append(item.in_flight_tokens)
            numbers.append(item.hit_limit)
            numbers.append(item.held_elsewhere)
        else:
            account, time = item.account, item.time
            made.texts.append(item.prompt + item.added)
            made.begins.append(account.prompt_tokens)
            numbers += [0, 0, 0, 0, 0]
        made.owners.append(account)
        made.times.append(time)
    made.numbers.extend(numbers)
    return made


def note(items: list[RequestAccount | Growth], stamps: list[int]) -> None:
    """The sample has seen the items' places, with these stamps."""
    for item, stamp in zip(items, stamps, strict=True):
        if isinstance(item, RequestAccount):
            item.sampled(stamp)
