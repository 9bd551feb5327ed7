"""Prompts with the answers that a model is made to give, which repeat as real text does.

Prose is Python's documentation and code its standard library, as every installation holds them;
edits are taken from this repository's history up to a fixed commit. Where an answer's words had to
be made up (introductions of quotes, plans of agents, records), they are drawn by a seed.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.public_text import code, prose
from coppice.frontend.demo.facts import ask, make_document

ROOT = Path(__file__).resolve().parents[2]
LAST_COMMIT = "8b0fc09"  # whose history edits are taken from


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: a prompt, and the text that is to answer it.

    Attributes:
        schema: that the answer follows, if it is JSON by one.
    """

    prompt: str
    answer: str
    schema: dict[str, Any] | None = None


def paragraphs_of_prose() -> list[str]:
    """Paragraphs of prose of 200 to 1,500 characters."""
    return [each for each in prose().split("\n\n") if 200 <= len(each) <= 1500]


def quotes(count: int) -> list[Turn]:
    """Answers that quote paragraphs of a document, with sentences of their own between them."""
    rng, paragraphs = random.Random(1), paragraphs_of_prose()
    turns = []
    leads = (
        "The document says about this:",
        "There is a passage on this point. It reads:",
        "A further paragraph explains it in these words:",
        "As the text puts it,",
        "This is what the section states:",
    )
    for number in range(count):
        begin = rng.randrange(len(paragraphs) - 8)
        document = paragraphs[begin : begin + 8]
        quoted = rng.sample(document, 2)
        own = rng.sample(leads, 2)
        answer = "\n\n".join(f'{lead}\n\n"{text}"' for lead, text in zip(own, quoted, strict=True))
        last = f"Together these answer question {number}: the rule applies in both cases."
        question = "What does the document say about it? Quote the paragraphs that matter."
        turns.append(Turn("\n\n".join([*document, question]) + "\n\n", f"{answer}\n\n{last}"))
    return turns


def edits(count: int) -> list[Turn]:
    """Source files before a change of this repository, and after it."""
    turns: list[Turn] = []
    for commit in _git("log", "--format=%H", "--no-merges", LAST_COMMIT).split():
        for line in _git("diff", "--numstat", f"{commit}^", commit, "--", "*.py").splitlines():
            added, removed, path = line.split("\t")
            if added == "-" or not 2 <= int(added) + int(removed) <= 40 or "=>" in path:
                continue
            if not int(removed):
                continue
            before = _git("show", f"{commit}^:{path}")
            after = _git("show", f"{commit}:{path}")
            if 1500 <= len(before) <= 5000 and after:
                subject = _git("show", "-s", "--format=%s", commit).strip()
                prompt = f"{before}\n# Change this file: {subject}\n\n"
                turns.append(Turn(prompt, after))
                if len(turns) == count:
                    return turns
                break
    raise ValueError(f"the history has {len(turns)} edits; {count} are asked for")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "orders": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "order_number": {"type": "integer"},
                    "customer_name": {"type": "string"},
                    "delivery_address": {
                        "type": "object",
                        "properties": {
                            "street": {"type": "string"},
                            "postal_code": {"type": "string"},
                            "city": {"type": "string"},
                        },
                        "required": ["street", "postal_code", "city"],
                        "additionalProperties": False,
                    },
                    "payment_method": {"enum": ["credit_card", "bank_transfer", "on_delivery"]},
                    "express_delivery": {"type": "boolean"},
                },
                "required": [
                    "order_number",
                    "customer_name",
                    "delivery_address",
                    "payment_method",
                    "express_delivery",
                ],
                "additionalProperties": False,
            },
        }
    },
    "required": ["orders"],
    "additionalProperties": False,
}


def records(count: int) -> list[Turn]:
    """JSON by a schema: orders whose values are not in the prompt."""
    rng = random.Random(2)
    words = sorted({each for each in prose().split() if each.isalpha() and 4 <= len(each) <= 9})

    def word() -> str:
        return rng.choice(words).capitalize()

    turns = []
    for _ in range(count):
        orders = [
            {
                "order_number": rng.randrange(10_000, 99_999),
                "customer_name": f"{word()} {word()}",
                "delivery_address": {
                    "street": f"{word()} Street {rng.randrange(1, 200)}",
                    "postal_code": f"{rng.randrange(10_000, 99_999)}",
                    "city": word(),
                },
                "payment_method": rng.choice(["credit_card", "bank_transfer", "on_delivery"]),
                "express_delivery": rng.random() < 0.5,
            }
            for _ in range(5)
        ]
        answer = json.dumps({"orders": orders})
        turns.append(Turn("List five orders of today as JSON.\n", answer, SCHEMA))
    return turns


def agents(count: int) -> list[Turn]:
    """Steps of agents that follow one plan, each with names and observations of its own."""
    rng, paragraphs = random.Random(3), paragraphs_of_prose()
    names = sorted({each for each in code().split() if each.isidentifier() and len(each) > 5})
    turns = []
    for number in range(count):
        first, second, third = rng.sample(names, 3)
        seen = rng.choice(paragraphs)[:300]
        system = (
            "You repair a code base. Think, then call one tool at a time: search(query), "
            "open(path, line), edit(path, old, new), run(command). Finish with done(summary).\n"
        )
        task = f"Task {number}: calls of `{first}` fail when `{second}` is empty. {seen}\n"
        answer = (
            f"Thought: I first look for the places where `{first}` is called.\n"
            f'Action: search(query="{first}(")\n'
            f"Thought: The result shows that `{first}` is called in src/{third}.py. I open the "
            f"file at that line.\n"
            f'Action: open(path="src/{third}.py", line={rng.randrange(10, 400)})\n'
            f"Thought: The function does not check whether `{second}` is empty before it uses it. "
            f"I add a check at the beginning of the function and return early in this case.\n"
            f'Action: edit(path="src/{third}.py", old="    {first}({second})", '
            f'new="    if not {second}:\\n        return None\\n    {first}({second})")\n'
            f"Thought: Now I run the tests of this module to see that the change works and that "
            f"nothing else is broken.\n"
            f'Action: run(command="pytest tests/test_{third}.py -q")\n'
            f"Thought: All tests pass. I describe the change in one sentence and finish.\n"
            f'Action: done(summary="`{first}` is no longer called when `{second}` is empty.")\n'
        )
        turns.append(Turn(system + task, answer))
    return turns


def demo(count: int) -> list[Turn]:
    """The demo's conversations: questions about one handbook, answered by its facts."""
    document = make_document(7, 60, split="eval")
    turns = []
    for question in ask(document, 7, count):
        answer = f"{question.answer}. {question.fact.sentence}"
        turns.append(Turn(f"{document.text}\n\n{question.text}\n", answer))
    return turns


def chat(count: int) -> list[Turn]:
    """Answers of prose to questions that share nothing with them."""
    rng, paragraphs = random.Random(4), paragraphs_of_prose()
    rng.shuffle(paragraphs)
    topics = ("lakes", "bread", "winter", "music", "bicycles", "tea", "maps", "sleep", "bridges")
    turns = []
    for number in range(count):
        prompt = f"Tell me something about {topics[number % len(topics)]}, part {number}.\n\n"
        turns.append(Turn(prompt, "\n\n".join(paragraphs[2 * number : 2 * number + 2])))
    return turns


WORKLOADS: dict[str, Callable[[int], list[Turn]]] = {
    "quotes": quotes,
    "edits": edits,
    "schema": records,
    "agents": agents,
    "demo": demo,
    "chat": chat,
}
"""The texts by name; random tokens, which are no text, are made where they are used."""
