"""The attributes of people, goods and places in the demo's handbooks, and questions about them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

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

Draw: TypeAlias = Callable[[random.Random], str]
"""Draws a value."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """How one kind of fact is drawn, stated and asked for.

    Attributes:
        name: of the attribute.
        cue: the word that all its sentences and questions contain.
        draw: draws a value.
        sentences: templates with ``{e}`` for the entity and ``{v}`` for the value.
        questions: templates with ``{e}``.
    """

    name: str
    cue: str
    draw: Draw
    sentences: tuple[str, ...]
    questions: tuple[str, ...]


def _code(rng: random.Random) -> str:
    return f"{rng.choice(CODE_PREFIXES)}-{rng.randrange(10, 100)}"


def _room(rng: random.Random) -> str:
    return f"{rng.choice('ABCDEFGH')}{rng.randrange(10, 100)}"


def _price(rng: random.Random) -> str:
    return f"{rng.randrange(2, 100)}.{rng.randrange(0, 100, 5):02d}"


def _street(rng: random.Random) -> str:
    return f"{rng.choice(STREET_WORDS)} {rng.choice(STREET_KINDS)}"


def _one_of(words: tuple[str, ...]) -> Draw:
    return lambda rng: rng.choice(words)


def _number(low: int, high: int, unit: str = "") -> Draw:
    return lambda rng: f"{rng.randrange(low, high)}{unit}"


def _time(first_hour: int, last_hour: int) -> Draw:
    return lambda rng: f"{rng.randint(first_hour, last_hour):02d}:{rng.randrange(0, 60, 5):02d}"


_MORNING = _time(5, 11)


# Wordings vary, but all sentences and questions of an attribute share a word, its cue: a model this
# small learns to match words in minutes, but synonyms only one by one. A value always comes after
# its entity and cue, so that a model that reads from left to right knows what it belongs to.
_PERSON = (
    Attribute(
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
    Attribute(
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
    Attribute(
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
    Attribute(
        "shift",
        "shift",
        _MORNING,
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
    Attribute(
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
    Attribute(
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
    Attribute(
        "extension",
        "extension",
        _number(1000, 10000),
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
    Attribute(
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
    Attribute(
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
    Attribute(
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
    Attribute(
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
    Attribute(
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
    Attribute(
        "weight",
        "weight",
        _number(2, 100, " kg"),
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
    Attribute(
        "opening time",
        "open",
        _MORNING,
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
    Attribute(
        "closing time",
        "close",
        _time(13, 23),
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
    Attribute(
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
    Attribute(
        "seats",
        "seats",
        _number(10, 100),
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
    Attribute(
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
    Attribute(
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
class Section:
    """One kind of entity: its heading in the handbook, its names' parts, its attributes."""

    heading: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    attributes: tuple[Attribute, ...]


SECTIONS = (
    Section("People", GIVEN_NAMES, FAMILY_NAMES, _PERSON),
    Section("Goods", ADJECTIVES, GOODS, _GOOD),
    Section("Places", PLACE_WORDS, PLACE_KINDS, _PLACE),
)
