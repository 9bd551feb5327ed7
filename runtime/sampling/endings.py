"""Completes JSON in time: finds the tokens after which a text could not be completed in its room.

A text that `max_tokens` cuts is of little use as JSON. So the shortest completion is searched now
and then, and at each token once the room gets short; a token that leaves too little room for it is
forbidden. A text that ends by itself in its room never chooses such a token, so it stays the same.
"""

from __future__ import annotations

import re
from heapq import heappop, heappush
from itertools import count

from coppice.runtime.sampling.grammar_library import LLMatcher, LLTokenizer

_NEAR = 48  # tokens of slack from which each token is checked: one rarely needs more by itself
_MOST_NODES = 3000  # of one search
_MOST_BYTES = 4000  # of a completion
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_QUOTE, _BACKSLASH, _BRACE = ord('"'), ord("\\"), ord("{")
_OPENING, _CLOSING = frozenset(b"{["), frozenset(b"}]")
_BETWEEN = frozenset(b",:")
_SPACE = frozenset(b" \t\n\r")
_SAMPLE = b'01a"A- .}],:{[tfnu'  # bytes that are tried where nearly all are allowed


class Ending:
    """The shortest completion of one text that follows a grammar for JSON.

    Args:
        start: the grammar at its beginning, compiled for a tokenizer of 256 bytes.
        tokenizer: of the model.
        lead: what comes before that, such as reasoning, at its beginning, for the model's tokens;
            None: nothing does.

    Attributes:
        cut: whether a token was forbidden, so that the text ends earlier than the model would.
    """

    __slots__ = ("cut", "_start", "_tokenizer", "_lead", "_led", "_read", "_begin", "_begun",
                 "_matcher", "_fed", "_next", "_bytes", "_tokens")  # fmt: skip

    def __init__(
        self, start: LLMatcher, tokenizer: LLTokenizer, lead: LLMatcher | None = None
    ) -> None:
        self.cut = False
        self._start = start
        self._lead = lead
        self._led: LLMatcher | None = None  # the lead after the first `_read` tokens
        self._read = 0
        self._begin: int | None = None  # tokens after which the form begins, or may begin
        self._begun = False  # whether it has
        if lead is None:
            self._begin, self._begun = 0, True
        self._tokenizer = tokenizer
        self._matcher: LLMatcher | None = None
        self._fed = b""  # what `_matcher` has read
        self._next: int | None = None  # the room from which the next token is checked
        self._bytes, self._tokens = b"", [0]  # the last completion that was found

    def forked(self) -> Ending:
        """That of a text that continues from the same tokens."""
        other = Ending(self._start, self._tokenizer, self._lead)
        other.cut, other._next = self.cut, self._next
        return other

    def due(self, room: int, whole: int) -> bool:
        """Whether the next token must be checked: `room` tokens of `whole` are left, with it."""
        if self._next is None:
            # Texts that end early are never searched, and each token so far may have opened a
            # bracket that takes seven to close, with what is required there.
            self._next = whole * 7 // 8
        return room <= self._next

    def fits(self, generated: list[int], token: int, room: int) -> bool:
        """Whether the text can be completed in its room with this token after those generated.

        `room` counts from the token on.
        """
        if not self._begun and self._leads(generated, token):
            return True
        matcher = self._at([*generated, token])
        # The completion before the token mostly completes the text after it, too.
        if matcher is None or not (len(self._tokens) < room and self._completes(matcher)):
            found = None if matcher is None else shortest(matcher, self._fed)
            if found is None:
                self._next = -1  # there is none, or it is hard to find
                return True
            self._bytes, self._tokens = found, _fewest(self._tokenizer, found)
        slack = room - 1 - len(self._tokens)
        # Most tokens need at most one more to complete the text: then slack shrinks by 2. Where
        # brackets were opened that need much, it goes on shrinking as fast as it did.
        growth = max(1.0, len(self._tokens) / max(1, len(generated) + 1))
        self._next = room - 1 - int(max(0, slack - _NEAR) / (2 * (1 + growth)))
        return slack >= 0

    def forced(self, generated: list[int], room: int, otherwise: int) -> int:
        """The first token of the shortest completion; `otherwise` if none has the room."""
        matcher = self._at(generated)
        found = None if matcher is None else shortest(matcher, self._fed)
        tokens = _fewest(self._tokenizer, found) if found else []
        if not tokens or len(tokens) > room:
            self._next = -1  # it can't be helped any more
            return otherwise
        self._bytes, self._tokens = b"", [0]
        return tokens[0]

    def _completes(self, matcher: LLMatcher) -> bool:
        """Whether the last completion completes what the matcher has read."""
        if not self._bytes:
            return False
        read = matcher.try_consume_tokens(list(self._bytes))
        complete = read == len(self._bytes) and bool(matcher.is_accepting())
        if read:
            matcher.rollback(read)
        return complete

    def _leads(self, generated: list[int], token: int) -> bool:
        """Whether the token still belongs to what comes before the form."""
        if self._led is None:
            assert self._lead is not None
            self._led = self._lead.deep_copy()
            self._begin = 0 if self._led.is_accepting() else None
        for each in generated[self._read :]:
            if not self._led.try_consume_tokens([each]):
                self._begun = True
                return False
            self._read += 1
            if self._led.is_accepting():
                self._begin = self._read
        if self._begin is None:
            return True
        if self._led.try_consume_tokens([token]):
            self._led.rollback(1)
            return True
        return False

    def _at(self, tokens: list[int]) -> LLMatcher | None:
        """The grammar after these tokens; None if they do not follow it."""
        text = self._tokenizer.decode_bytes(tokens[self._begin or 0 :])
        if self._begin:
            text = text.lstrip(b" \n")  # a token may end the lead and begin the form
        matcher, fed = self._matcher, self._fed
        if matcher is None:
            matcher, fed = self._start.deep_copy(), b""
        same = _common(fed, text)
        if len(fed) > same:
            matcher.rollback(len(fed) - same)
        self._matcher, self._fed = matcher, text
        if matcher.try_consume_tokens(list(text[same:])) == len(text) - same:
            return matcher
        self._matcher = None
        return None


def shortest(matcher: LLMatcher, text: bytes) -> bytes | None:
    """The shortest bytes with which JSON, read up to `text`, is complete; None if none was found.

    A best-first search over the bytes that the grammar allows. Two ways that leave the same bytes,
    the same open brackets, the same number of parts and the same last name of a property are taken
    for one: without the name, a property that may be left out could hide one that is required. The
    first way that closes a bracket of the text is taken, so that the cost grows with the number of
    brackets and not with a power of it; where no text continues from there, all ways are searched.
    The matcher is left as it came.
    """
    found = _search(matcher, text, settle=True)
    return _search(matcher, text, settle=False) if found is None else found


def _search(matcher: LLMatcher, text: bytes, settle: bool) -> bytes | None:
    """`shortest`, with or without settling for the first way to close a bracket."""
    outside = _STRING.sub(b"", text)
    quoted = b'"' in outside
    depth = _open(outside.partition(b'"')[0])
    escaped = quoted and (len(text) - len(text.rstrip(b"\\"))) % 2 == 1
    name = b""
    if quoted and _begins_name(outside.rpartition(b'"')[0]):
        name = text[text.rfind(b'"') :]
    order = count()
    # (length at least, tie, bytes, in a string, after a backslash, open brackets, parts, run, name)
    waiting = [(depth + quoted, 0, b"", quoted, escaped, depth, 0, 0, name)]
    seen: set[tuple[object, ...]] = set()
    at, nodes, found, lowest = b"", 0, None, depth
    while waiting:
        _, _, path, quoted, escaped, depth, parts, run, name = heappop(waiting)
        nodes += 1
        if settle and depth < lowest and not quoted:
            waiting.clear()
            lowest, nodes = depth, 0
        same = _common(at, path)
        if len(at) > same:
            matcher.rollback(len(at) - same)
        if len(path) > same:
            matcher.consume_tokens(list(path[same:]))
        at = path
        if depth <= 0 and not quoted and matcher.is_accepting():
            found = path
            break
        if nodes > _MOST_NODES:
            break
        mask = matcher.compute_bitmask()[:32]
        key = (mask, quoted, escaped, depth, parts, run, name)
        if key in seen or len(path) > _MOST_BYTES:
            continue
        seen.add(key)
        for byte in _candidates(mask, quoted and not escaped):
            if quoted:
                ends = byte == _QUOTE and not escaped
                state = (not ends, byte == _BACKSLASH and not escaped, depth, parts)
            else:
                level = depth + (byte in _OPENING) - (byte in _CLOSING)
                state = (byte == _QUOTE, False, level, parts + (byte in _BETWEEN))
            new = run + 1 if state[3] == parts and state[2] == depth else 0
            least = len(path) + 1 + max(0, state[2]) + state[0]
            named = name
            if quoted and _half(name) and byte < 128:  # parts of a character have many ways
                named = name + bytes((byte,))
            elif not quoted and byte == _QUOTE and _begins_name(text + path):
                named = b'"'
            heappush(waiting, (least, next(order), path + bytes((byte,)), *state, new, named))
    if at:
        matcher.rollback(len(at))
    return found


def _half(name: bytes) -> bool:
    """Whether a property's name has begun and not ended."""
    return name.startswith(b'"') and (len(name) == 1 or not name.endswith(b'"'))


def _begins_name(text: bytes) -> bool:
    """Whether a string that begins after a text is a property's name."""
    text = text.rstrip()
    if not text.endswith(b","):
        return text.endswith(b"{")
    depth = 0
    for byte in reversed(_STRING.sub(b"", text)):
        if byte in _CLOSING:
            depth += 1
        elif byte in _OPENING:
            depth -= 1
            if depth < 0:
                return byte == _BRACE
    return False


def _candidates(mask: bytes, quoted: bool) -> list[int]:
    """Bytes to go on with: not all of those that lead to the same place."""
    bits = int.from_bytes(mask, "little")
    if quoted and bits >> _QUOTE & 1:
        return [_QUOTE]
    if not quoted:
        for byte in b"}],":  # a value is complete where one of these is allowed
            if bits >> byte & 1:
                return [byte]
    allowed = [byte for byte in range(256) if bits >> byte & 1]
    if len(allowed) > 24:
        some = [byte for byte in _SAMPLE if bits >> byte & 1]
        allowed = some or allowed[:8]
    if not quoted:
        allowed = [byte for byte in allowed if byte not in _SPACE] or allowed[:1]
    return allowed


def _open(outside: bytes) -> int:
    """Brackets that are open after text outside of strings."""
    opened = outside.count(b"{") + outside.count(b"[")
    return opened - outside.count(b"}") - outside.count(b"]")


def _common(one: bytes, other: bytes) -> int:
    """The number of bytes with which both begin."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _fewest(tokenizer: LLTokenizer, text: bytes) -> list[int]:
    """Tokens of a text, as few as two ways of splitting it give."""
    ways = [tokenizer.tokenize_bytes(text), tokenizer.greedy_tokenize(text.decode(errors="ignore"))]
    exact = [tokens for tokens in ways if tokenizer.decode_bytes(tokens) == text]
    return min(exact, key=len, default=[])
