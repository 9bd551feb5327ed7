"""Synthetic handbooks of facts, and questions about them, for the demo and to train its model.

A document is the handbook of an invented town's cooperative, with its people, goods and places.
Every sentence states one fact, (entity, attribute) -> value, with the entity's full name in it, so
that each question has exactly one answer and the text contains it.

Names are combinations (given + family name, adjective + noun, word + kind of place). A hash of the
combination decides whether it belongs to the ``train`` or the ``eval`` split, so no entity of an
evaluation occurs in training, for any seeds.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Literal

from coppice.frontend.demo.attributes import SECTIONS, Section
from coppice.frontend.demo.words import CITIES

Split = Literal["train", "eval"]
_EVAL_SHARE = 8  # one combination of names in 8 belongs to the eval split


@dataclass(frozen=True, slots=True)
class Fact:
    """What one sentence states; ``cue`` is the word that names the attribute in it."""

    entity: str
    attribute: str
    value: str
    sentence: str
    cue: str


@dataclass(frozen=True, slots=True)
class Document:
    """A handbook: its text and, in the order of the text, the facts that it states."""

    text: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one fact; ``answer`` is the fact's value, letter for letter."""

    text: str
    answer: str
    fact: Fact


_QUESTIONS = {
    attribute.name: attribute.questions for section in SECTIONS for attribute in section.attributes
}


def split_of(entity: str) -> Split:
    """The split that an entity's name belongs to, by a hash of the whole name."""
    return "eval" if zlib.crc32(entity.encode()) % _EVAL_SHARE == 0 else "train"


def make_document(seed: int, num_facts: int, split: Split = "train") -> Document:
    """Draws a handbook that states ``num_facts`` facts; the same arguments give the same text.

    A fact takes about 14 tokens of the demo model's tokenizer. Entities of one section often share
    half of their names ("Mara Ellison", "Mara Whitlock"), and all share their attributes, so an
    answer needs the whole name and the attribute.

    Raises:
        ValueError: ``num_facts`` is not positive, or ``split`` is neither "train" nor "eval".
    """
    if num_facts < 1:
        raise ValueError(f"num_facts is {num_facts}; it must be at least 1")
    if split not in ("train", "eval"):
        raise ValueError(f"split is {split!r}; it must be 'train' or 'eval'")
    rng = random.Random(f"{split}:{seed}")
    town = rng.choice(CITIES)
    paragraphs = [f"Handbook of the {town} Cooperative."]
    facts: list[Fact] = []
    taken: set[str] = set()
    for section, share in zip(SECTIONS, _shares(rng, num_facts), strict=True):
        if share == 0:
            continue
        drawn = _draw_facts(rng, section, share, split, taken)
        facts += drawn
        paragraphs.append(f"{section.heading}: " + " ".join(fact.sentence for fact in drawn))
    return Document("\n\n".join(paragraphs), tuple(facts))


def ask(document: Document, seed: int, n: int) -> list[Question]:
    """Draws ``n`` questions about different facts of the document, in random order.

    Raises:
        ValueError: ``n`` is negative or larger than the number of facts.
    """
    if not 0 <= n <= len(document.facts):
        raise ValueError(f"n is {n}; the document has {len(document.facts)} facts to ask about")
    rng = random.Random(f"ask:{seed}")
    return [
        Question(rng.choice(_QUESTIONS[fact.attribute]).format(e=fact.entity), fact.value, fact)
        for fact in rng.sample(document.facts, n)
    ]


def _shares(rng: random.Random, num_facts: int) -> list[int]:
    """Divides the facts among the sections at random; a handbook of fewer than 10 has one."""
    weights = [rng.uniform(0.5, 1.5) for _ in SECTIONS]
    if num_facts < 10:
        only = rng.randrange(len(SECTIONS))
        weights = [float(section == only) for section in range(len(SECTIONS))]
    shares = [int(num_facts * weight / sum(weights)) for weight in weights]
    shares[shares.index(max(shares))] += num_facts - sum(shares)
    return shares


def _draw_facts(
    rng: random.Random, section: Section, count: int, split: Split, taken: set[str]
) -> list[Fact]:
    """Draws ``count`` facts of one section; names in ``taken`` are not drawn again."""
    # Few first halves to choose from, so that several entities share one.
    firsts = rng.sample(section.first, min(len(section.first), 2 + count // 8))
    facts: list[Fact] = []
    while len(facts) < count:
        names = [f"{first} {second}" for first in firsts for second in section.second]
        names = [name for name in names if name not in taken and split_of(name) == split]
        if not names:  # used up: widen the choice
            firsts.append(rng.choice(section.first))
            continue
        entity = rng.choice(names)
        taken.add(entity)
        known = min(count - len(facts), rng.randint(2, len(section.attributes)))
        for attribute in rng.sample(section.attributes, known):
            value = attribute.draw(rng)
            sentence = rng.choice(attribute.sentences).format(e=entity, v=value)
            facts.append(Fact(entity, attribute.name, value, sentence, attribute.cue))
    if rng.random() < 0.5:  # half of the handbooks keep an entity's facts together
        rng.shuffle(facts)
    return facts
