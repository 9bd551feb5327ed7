"""The share of a handbook's questions that the demo model answers exactly.

    python benchmarks/demo_accuracy.py [--model DIR] [--json FILE] [--quick]

Each of 200 conversations (`--quick`: 20) has a fresh document of 600 to 1,000 tokens as its system
prompt and three different questions about it. transformers' `generate` answers them greedily, by
the chat template. The answers to the first and the third question are scored: right means equal to
the fact's value, character for character. Documents come from the eval split, whose names never
occur in training (`coppice.frontend.demo.facts`). Rows: each kind of fact, then each turn.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.harness import Rows, parser
from coppice.frontend.demo.facts import Document, ask, make_document

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "frontend" / "demo" / "model"
TURNS = 3
SCORED_TURNS = (1, TURNS)


def fresh_document(tokenizer: Any, seed: int, shortest: int = 600, longest: int = 1000) -> Document:
    """The first document of `seed` whose length in tokens is in the range."""
    for attempt in range(1000):
        # The number of facts varies with the seed, so that all lengths occur.
        document = make_document(seed * 1000 + attempt, 58 + (seed * 7 + attempt) % 40, "eval")
        if shortest <= len(tokenizer(document.text)["input_ids"]) <= longest:
            return document
    raise RuntimeError(f"no document of {shortest} to {longest} tokens in 1000 tries")


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """The model's greedy answer to a conversation, as text."""
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    new = out[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def measure(model_dir: Path, conversations: int, seed: int = 0) -> list[dict[str, Any]]:
    """Asks `TURNS` questions in each conversation; returns the rows."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    right: dict[int, int] = defaultdict(int)
    kinds: dict[str, list[bool]] = defaultdict(list)
    lengths: list[int] = []
    for conversation in range(conversations):
        document = fresh_document(tokenizer, seed * conversations + conversation)
        lengths.append(len(tokenizer(document.text)["input_ids"]))
        messages = [{"role": "system", "content": document.text}]
        for turn, question in enumerate(ask(document, conversation, TURNS), start=1):
            messages.append({"role": "user", "content": question.text})
            text = answer(model, tokenizer, messages)
            messages.append({"role": "assistant", "content": text})
            if turn in SCORED_TURNS:
                right[turn] += text == question.answer
                kinds[question.fact.attribute].append(text == question.answer)
    common = {"benchmark": "demo_accuracy", "model": model_dir.name}
    rows: list[dict[str, Any]] = [
        common | {"attribute": kind, "questions": len(hits), "exact": sum(hits) / len(hits)}
        for kind, hits in sorted(kinds.items())
    ]
    documents = {"shortest_document": min(lengths), "longest_document": max(lengths)}
    for turn in SCORED_TURNS:
        exact = {"turn": turn, "questions": conversations, "exact": right[turn] / conversations}
        rows.append(common | exact | documents)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the model")
    args = options.parse_args()
    rows = Rows(args.json)
    for row in measure(args.model, conversations=20 if args.quick else 200):
        rows.add(**row)


if __name__ == "__main__":
    main()
