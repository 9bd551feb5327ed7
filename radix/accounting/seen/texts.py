"""Parts of texts, and hashes of them, for places that were chosen in many texts."""

from __future__ import annotations

from xxhash import xxh3_64, xxh3_64_intdigest

from coppice.radix.tokens import TOKEN_BYTES


def rests(texts: list[bytes], begins: list[int], before: int) -> list[bytes]:
    """Of each text what follows its token `begins[i]`, and `before` tokens before that.

    Where there are fewer, zeros stand for those that are missing. Joined, the parts have a piece
    for each text.
    """
    parts: list[bytes] = []
    missing = bytes(before * TOKEN_BYTES)
    for at, text in enumerate(texts):
        begin = begins[at]
        if begin >= before:
            parts.append(text[(begin - before) * TOKEN_BYTES :])
        else:
            parts.append(missing[begin * TOKEN_BYTES :])
            parts.append(text)
    return parts


def hashed(
    texts: list[bytes], owners: list[int], positions: list[int], window: int, seed: int
) -> tuple[list[int], list[int]]:
    """For each place a hash of its text up to it, and one of the last `window` tokens of that.

    `owners` are the places' texts, one after another, and `positions` their tokens, which grow in
    each text. O(tokens of the texts with a place).
    """
    prefixes: list[int] = []
    contents: list[int] = []
    owner, done = -1, 0
    text = b""
    state = xxh3_64(seed=seed)
    for at, number in enumerate(owners):
        end = (positions[at] + 1) * TOKEN_BYTES
        if number != owner:
            owner, done, text = number, 0, texts[number]
            state = xxh3_64(seed=seed)
        state.update(memoryview(text)[done:end])
        done = end
        prefixes.append(state.intdigest())
        begin = end - window * TOKEN_BYTES
        contents.append(xxh3_64_intdigest(text[begin if begin > 0 else 0 : end], seed))
    return prefixes, contents
