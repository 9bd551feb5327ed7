"""Supervised attention: where some heads of the demo model should look while it is trained.

To answer, the model has to know for each token of a value whose value it is, and to find the value
that belongs to the entity and the attribute of a question. That takes two layers of attention:

    "The badge of Mara Ellison is QX - 48 ."    ...    "What is Mara Ellison's badge?"  QX - 48
              ^       ^      ^    |                                                      |
              cue   first   last  | layer 1: each token of a value, and each token       |
              '-------'------'----' that an answer is predicted from, looks at the cue   |
                                  | and both parts of the name in its sentence           |
                                  '------------------------------------------------------'
                                    layer 2: the token that an answer is predicted from
                                    looks at the token of the document to be copied next

The generator of documents knows all these positions. So some heads get a loss of their own: minus
the log of the attention that they pay to the right position (Liu et al., Neural machine translation
with supervised attention, COLING 2016). The other heads, and the last layer, are free.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coppice.frontend.demo.facts import Fact, ask, make_document
from demo.llama import HEAD_DIM, HEADS, KV_HEADS
from demo.tokenizer import ASSISTANT, BOS, END, SYSTEM, USER

GATHER_LAYER, GATHER_HEADS = 1, (0, 1, 2)  # the heads that look at last, cue and first
FIND_LAYER, FIND_HEADS = 2, (0, 2)  # one of each group of query heads

Offsets = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Mention:
    """Where a fact is stated or asked for, as positions of characters in a conversation.

    `last`, `cue` and `first` are the last characters of the family name (or what stands for it), of
    the cue, and of the given name. `value` is the span of the value, in the document or in the
    answer. In an answer, `begin` is the position of the assistant's mark before it, and `source`
    the value's span in the document.
    """

    last: int
    cue: int
    first: int
    value: range
    begin: int | None = None
    source: range | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A handbook and questions on it with their answers, as the chat template writes them."""

    text: str
    mentions: tuple[Mention, ...]


def draw_conversation(rng: random.Random, num_facts: int, length: int) -> Conversation:
    """A fresh document of the train split, and questions until there are `length` tokens."""
    document = make_document(rng.getrandbits(48), num_facts, "train")
    text = f"{BOS}{SYSTEM}"
    mentions = []
    sources: dict[Fact, range] = {}
    for fact in document.facts:
        at = len(text) + document.text.index(fact.sentence)
        value = at + fact.sentence.rindex(fact.value)
        sources[fact] = range(value, value + len(fact.value))
        mentions.append(Mention(*_names(fact, fact.sentence, at), sources[fact]))
    text += document.text + END
    # A fact has at least 10 tokens and a turn at least 12, so this fills the sequence. After the
    # last fact the questions start again.
    room = length - 10 * num_facts
    while room > 0:
        for question in ask(document, rng.getrandbits(48), num_facts):
            fact = question.fact
            names = _names(fact, question.text, len(text) + len(USER))
            text += f"{USER}{question.text}{END}"
            begin = len(text)
            text += ASSISTANT
            value = range(len(text), len(text) + len(question.answer))
            text += f"{question.answer}{END}"
            mentions.append(Mention(*names, value, begin, sources[fact]))
            room -= 12
    return Conversation(text, tuple(mentions))


def _names(fact: Fact, sentence: str, at: int) -> tuple[int, int, int]:
    """The positions of family name, cue and given name in a sentence that begins at `at`."""
    entity = at + sentence.index(fact.entity)
    first, _ = fact.entity.split(" ", 1)
    # The cue is searched outside the name, which may contain the same letters.
    hidden = sentence.replace(fact.entity, "\0" * len(fact.entity)).lower()
    cue = at + hidden.rindex(fact.cue) + len(fact.cue) - 1
    return entity + len(fact.entity) - 1, cue, entity + len(first) - 1


@dataclass(frozen=True, slots=True)
class Guide:
    """Which tokens of a batch should look where; padded with zeros.

    `gather`, int64 [B, N, 4]: a token, and the last, cue and first that it should look at. `find`,
    int64 [B, M, 2]: a token, and the one that it should look at. `gathers`, bool [B, N], and
    `finds`, bool [B, M], are false for padding.
    """

    gather: Tensor
    gathers: Tensor
    find: Tensor
    finds: Tensor

    @classmethod
    def of(cls, talks: Sequence[Conversation], offsets: Sequence[Offsets], length: int) -> Guide:
        """Maps positions of characters to those of tokens; drops tokens from `length` on."""
        gather, find = [], []
        for talk, spans in zip(talks, offsets, strict=True):
            token_at = {c: i for i, (a, b) in enumerate(spans) for c in range(a, b)}
            gathering, finding = [], []
            for mention in talk.mentions:
                tokens = _tokens(mention.value, token_at)
                if mention.source is not None and mention.begin is not None:
                    wanted = _tokens(mention.source, token_at)
                    tokens = [token_at[mention.begin], *tokens[:-1]]
                    finding += list(zip(tokens, wanted, strict=True))
                names = (token_at[mention.last], token_at[mention.cue], token_at[mention.first])
                gathering += [(token, *names) for token in tokens]
            gather.append([entry for entry in gathering if entry[0] < length])
            find.append([entry for entry in finding if entry[0] < length])
        return cls(*_padded(gather, 4), *_padded(find, 2))


def _tokens(span: range, token_at: dict[int, int]) -> list[int]:
    return sorted({token_at[c] for c in span})


def _padded(rows: Sequence[Sequence[tuple[int, ...]]], width: int) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    entries = torch.zeros(len(rows), longest, width, dtype=torch.long)
    real = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        entries[i, : len(row)] = torch.tensor(row)
        real[i, : len(row)] = True
    return entries, real


def guidance_loss(seen: Sequence[tuple[Tensor, Tensor]], guide: Guide) -> tuple[Tensor, float]:
    """The loss of the guided heads, and the share of `find` tokens that look at the right one."""
    gathering = [
        _attention(*seen[GATHER_LAYER], head, guide.gather[..., 0], guide.gather[..., 1 + n])
        for n, head in enumerate(GATHER_HEADS)
    ]
    finding = [
        _attention(*seen[FIND_LAYER], head, guide.find[..., 0], guide.find[..., 1])
        for head in FIND_HEADS
    ]
    loss = -torch.stack([log[guide.gathers].mean() for log in gathering]).mean()
    loss = loss - torch.stack([log[guide.finds].mean() for log in finding]).mean()
    found = (finding[0].exp() > 0.5)[guide.finds].float().mean()
    return loss, found.item()


def _attention(q: Tensor, k: Tensor, head: int, source: Tensor, target: Tensor) -> Tensor:
    """Log of the attention that `head` pays from `source` [B, N] to `target` [B, N]: [B, N].

    `q` is [B, HEADS, T, D], `k` [B, KV_HEADS, T, D].
    """
    rows = q[:, head].gather(1, source[:, :, None].expand(-1, -1, HEAD_DIM))
    scores = (rows @ k[:, head // (HEADS // KV_HEADS)].mT) * HEAD_DIM**-0.5
    future = torch.arange(k.shape[2]) > source[:, :, None]
    log = scores.masked_fill(future, -torch.inf).log_softmax(-1)
    return log.gather(2, target[:, :, None])[..., 0]
