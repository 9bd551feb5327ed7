"""Synthetic handbooks of facts, and questions about them, for the demo and for training its model.

A document is the handbook of an invented town's cooperative: who works there, what it sells and
where it meets. Every sentence states one fact, (entity, attribute) -> value, with the entity's full
name in it, so that each question has exactly one answer and that answer stands in the text.

Names are combinations (given + family name, adjective + noun, word + kind of place). A hash of the
combination decides whether it belongs to the ``train`` or the ``eval`` split, so an entity that is
seen in evaluation can never have been seen in training, whatever the seeds.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from coppice.frontend.demo.words import (
    ADJECTIVES,
    CITIES,
    CODE_PREFIXES,
    COLOURS,
    DAYS,
    FAMILY_NAMES,
    GIVEN_NAMES,
    GOODS,
    PLACE_KINDS,
    PLACE_WORDS,
    STREET_KINDS,
    STREET_WORDS,
    TEAMS,
)

Split = Literal["train", "eval"]
_EVAL_SHARE = 8  # one combination of names in this many belongs to the eval split


@dataclass(frozen=True, slots=True)
class Fact:
    """One sentence's worth of knowledge; ``cue`` is the word that names the attribute in it."""

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


@dataclass(frozen=True, slots=True)
class _Attribute:
    """How one kind of fact is drawn, told and asked. ``{e}`` is the entity, ``{v}`` the value.

    ``cue`` is the word that all its sentences and questions have, whatever else varies.
    """

    name: str
    cue: str
    draw: Callable[[random.Random], str]
    sentences: tuple[str, ...]
    questions: tuple[str, ...]


def _code(rng: random.Random) -> str:
    return f"{rng.choice(CODE_PREFIXES)}-{rng.randrange(10, 100)}"


def _extension(rng: random.Random) -> str:
    return f"{rng.randrange(1000, 10000)}"


def _room(rng: random.Random) -> str:
    return f"{rng.choice('ABCDEFGH')}{rng.randrange(10, 100)}"


def _morning(rng: random.Random) -> str:
    return f"{rng.randrange(5, 12):02d}:{rng.randrange(0, 60, 5):02d}"


def _evening(rng: random.Random) -> str:
    return f"{rng.randrange(13, 24)}:{rng.randrange(0, 60, 5):02d}"


def _price(rng: random.Random) -> str:
    return f"{rng.randrange(2, 100)}.{rng.randrange(0, 100, 5):02d}"


def _weight(rng: random.Random) -> str:
    return f"{rng.randrange(2, 100)} kg"


def _seats(rng: random.Random) -> str:
    return f"{rng.randrange(10, 100)}"


def _street(rng: random.Random) -> str:
    return f"{rng.choice(STREET_WORDS)} {rng.choice(STREET_KINDS)}"


def _one_of(words: tuple[str, ...]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(words)


# Wordings vary, but every sentence and question of an attribute share a word, its cue: a model this
# small learns to match words in minutes, synonyms one by one and slowly. A value always comes after
# its entity and cue, so that a reader who goes from left to right knows what it belongs to.
_PERSON = (
    _Attribute(
        "home town",
        "home",
        _one_of(CITIES),
        (
            "The home town of {e} is {v}.",
            "{e}'s home town is {v}.",
            "As home town {e} names {v}.",
            "{e} has a home town called {v}.",
        ),
        (
            "What is the home town of {e}?",
            "What is {e}'s home town?",
            "Which home town does {e} have?",
            "Which town is the home town of {e}?",
        ),
    ),
    _Attribute(
        "badge",
        "badge",
        _code,
        (
            "The badge of {e} is {v}.",
            "{e} carries the badge {v}.",
            "{e}'s badge reads {v}.",
            "The badge given to {e} is {v}.",
        ),
        (
            "What is the badge of {e}?",
            "What is {e}'s badge?",
            "Which badge does {e} carry?",
            "What does the badge of {e} read?",
        ),
    ),
    _Attribute(
        "desk",
        "desk",
        _room,
        (
            "The desk of {e} is in room {v}.",
            "{e} has a desk in room {v}.",
            "{e}'s desk stands in room {v}.",
            "To find the desk of {e}, go to room {v}.",
        ),
        (
            "Which room is the desk of {e} in?",
            "In which room is {e}'s desk?",
            "Where is the desk of {e}?",
            "Which room should I go to for {e}'s desk?",
        ),
    ),
    _Attribute(
        "shift",
        "shift",
        _morning,
        (
            "The shift of {e} starts at {v}.",
            "{e} starts the shift at {v}.",
            "{e}'s shift begins at {v}.",
            "On most days the shift of {e} begins at {v}.",
        ),
        (
            "When does the shift of {e} start?",
            "At what time does {e} start the shift?",
            "When does {e}'s shift begin?",
            "What time does the shift of {e} begin?",
        ),
    ),
    _Attribute(
        "day off",
        "off",
        _one_of(DAYS),
        (
            "The day off of {e} is {v}.",
            "{e} has the day off on {v}.",
            "The day off for {e} falls on {v}.",
            "{e}'s day off falls on {v}.",
        ),
        (
            "What is the day off of {e}?",
            "On which day does {e} have the day off?",
            "When is {e}'s day off?",
            "Which day off does {e} have?",
        ),
    ),
    _Attribute(
        "team",
        "team",
        _one_of(TEAMS),
        (
            "{e} belongs to the team for {v}.",
            "The team of {e} is {v}.",
            "{e} has a place in the team for {v}.",
            "{e}'s team is {v}.",
        ),
        (
            "Which team is {e} in?",
            "What is the team of {e}?",
            "Which team does {e} belong to?",
            "What is {e}'s team?",
        ),
    ),
    _Attribute(
        "extension",
        "extension",
        _extension,
        (
            "The phone extension of {e} is {v}.",
            "Call {e} on extension {v}.",
            "{e} answers the phone on extension {v}.",
            "{e}'s extension is {v}.",
        ),
        (
            "What is the phone extension of {e}?",
            "Which extension do I call for {e}?",
            "On which extension does {e} answer the phone?",
            "What is {e}'s extension?",
        ),
    ),
)

_GOOD = (
    _Attribute(
        "price",
        "price",
        _price,
        (
            "The price of the {e} is {v}.",
            "The {e} has a price of {v}.",
            "For the {e} we charge a price of {v}.",
            "The {e} is sold at a price of {v}.",
        ),
        (
            "What is the price of the {e}?",
            "Which price does the {e} have?",
            "What price do we charge for the {e}?",
            "At what price is the {e} sold?",
        ),
    ),
    _Attribute(
        "stock code",
        "stock",
        _code,
        (
            "The stock code of the {e} is {v}.",
            "The {e} has the stock code {v}.",
            "In our list the {e} has the stock code {v}.",
            "The {e} is listed under the stock code {v}.",
        ),
        (
            "What is the stock code of the {e}?",
            "Which stock code does the {e} have?",
            "Under which stock code is the {e} listed?",
            "What is the {e}'s stock code?",
        ),
    ),
    _Attribute(
        "shelf",
        "shelf",
        _room,
        (
            "The {e} is kept on shelf {v}.",
            "The shelf for the {e} is {v}.",
            "Look for the {e} on shelf {v}.",
            "The {e} lies on shelf {v}.",
        ),
        (
            "Which shelf is the {e} on?",
            "On which shelf is the {e} kept?",
            "What is the shelf for the {e}?",
            "Which shelf should I look on for the {e}?",
        ),
    ),
    _Attribute(
        "colour",
        "colour",
        _one_of(COLOURS),
        (
            "The colour of the {e} is {v}.",
            "The {e} is painted in the colour {v}.",
            "The {e} has the colour {v}.",
            "The {e} comes in the colour {v}.",
        ),
        (
            "What is the colour of the {e}?",
            "What colour is the {e}?",
            "Which colour does the {e} come in?",
            "Which colour is the {e} painted?",
        ),
    ),
    _Attribute(
        "workshop",
        "workshop",
        _one_of(CITIES),
        (
            "The workshop for the {e} is in {v}.",
            "The workshop that makes the {e} is in {v}.",
            "Ask for the {e} at the workshop in {v}.",
            "The {e} comes from a workshop in {v}.",
        ),
        (
            "Where is the workshop for the {e}?",
            "Where is the workshop that makes the {e}?",
            "Which town is the workshop for the {e} in?",
            "In which town is the workshop that makes the {e}?",
        ),
    ),
    _Attribute(
        "weight",
        "weight",
        _weight,
        (
            "The weight of the {e} is {v}.",
            "The {e} has a weight of {v}.",
            "On the scales the {e} has a weight of {v}.",
            "Our list gives the weight of the {e} as {v}.",
        ),
        (
            "What is the weight of the {e}?",
            "What is the {e}'s weight?",
            "Which weight does the {e} have?",
            "Which weight does our list give for the {e}?",
        ),
    ),
)

_PLACE = (
    _Attribute(
        "opening time",
        "open",
        _morning,
        (
            "The doors of {e} open at {v}.",
            "In the morning we open {e} at {v}.",
            "Visitors find {e} open from {v}.",
            "{e} is open from {v}.",
        ),
        (
            "When does {e} open?",
            "At what time does {e} open?",
            "From what time is {e} open?",
            "When do the doors of {e} open?",
        ),
    ),
    _Attribute(
        "closing time",
        "close",
        _evening,
        (
            "The doors of {e} close at {v}.",
            "In the evening we close {e} at {v}.",
            "The lights go out and we close {e} at {v}.",
            "We close {e} for the night at {v}.",
        ),
        (
            "When does {e} close?",
            "At what time does {e} close?",
            "When do we close {e}?",
            "When do the doors of {e} close?",
        ),
    ),
    _Attribute(
        "address",
        "address",
        _street,
        (
            "The address of {e} is {v}.",
            "{e} has the address {v}.",
            "You find {e} at the address {v}.",
            "The address given for {e} is {v}.",
        ),
        (
            "What is the address of {e}?",
            "What is {e}'s address?",
            "Which address does {e} have?",
            "At which address do I find {e}?",
        ),
    ),
    _Attribute(
        "seats",
        "seats",
        _seats,
        (
            "{e} has seats for {v} people.",
            "The number of seats in {e} is {v}.",
            "The seats in {e} number {v}.",
            "In {e} the seats number {v}.",
        ),
        (
            "How many seats does {e} have?",
            "How many seats are there in {e}?",
            "What is the number of seats in {e}?",
            "For how many people does {e} have seats?",
        ),
    ),
    _Attribute(
        "keeper",
        "keeper",
        lambda rng: f"{rng.choice(GIVEN_NAMES)} {rng.choice(FAMILY_NAMES)}",
        (
            "The keeper of {e} is {v}.",
            "{e} is in the care of its keeper {v}.",
            "The keys of {e} are with the keeper {v}.",
            "The keeper who looks after {e} is {v}.",
        ),
        (
            "Who is the keeper of {e}?",
            "Who is {e}'s keeper?",
            "Which keeper looks after {e}?",
            "Which keeper has the keys of {e}?",
        ),
    ),
    _Attribute(
        "market day",
        "market",
        _one_of(DAYS),
        (
            "The market day at {e} is {v}.",
            "{e} holds its market on {v}.",
            "Market day at {e} falls on {v}.",
            "The market at {e} is held on {v}.",
        ),
        (
            "What is the market day at {e}?",
            "When is the market at {e}?",
            "On which day does {e} hold its market?",
            "Which day is market day at {e}?",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class _Section:
    """One kind of entity: its heading in the handbook, its names' parts, its attributes."""

    heading: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    attributes: tuple[_Attribute, ...]


_SECTIONS = (
    _Section("People", GIVEN_NAMES, FAMILY_NAMES, _PERSON),
    _Section("Goods", ADJECTIVES, GOODS, _GOOD),
    _Section("Places", PLACE_WORDS, PLACE_KINDS, _PLACE),
)
_QUESTIONS = {
    attribute.name: attribute.questions for section in _SECTIONS for attribute in section.attributes
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
    for section, share in zip(_SECTIONS, _shares(rng, num_facts), strict=True):
        if share == 0:
            continue
        told = _draw_facts(rng, section, share, split, taken)
        facts += told
        paragraphs.append(f"{section.heading}: " + " ".join(fact.sentence for fact in told))
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
    """Splits the facts over the sections at random; a short handbook has one section."""
    weights = [rng.uniform(0.5, 1.5) for _ in _SECTIONS]
    if num_facts < 10:
        only = rng.randrange(len(_SECTIONS))
        weights = [float(section == only) for section in range(len(_SECTIONS))]
    shares = [int(num_facts * weight / sum(weights)) for weight in weights]
    shares[shares.index(max(shares))] += num_facts - sum(shares)
    return shares


def _draw_facts(
    rng: random.Random, section: _Section, count: int, split: Split, taken: set[str]
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
