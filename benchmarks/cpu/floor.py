"""The least time that a step or a workload can take on a machine with given rates.

A step reads the weights and the KV of its sequences (each shared prefix once) and multiplies. It
takes at least max(bytes / bandwidth, arithmetic / matrix rate). The floor of a workload is the sum
over the fewest steps that compute it: one for each turn's prompts, and one for each further token
of all sequences together. Norms, activations, sampling and writes count as free, so no engine
reaches the floor, unless a processor cache holds the weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu.rates import Rates
from cpu.workloads import Workload


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model: numbers in the matrices of all layers and of the head, and widths."""

    layer_parameters: int
    head_parameters: int
    query_width: int
    kv_width: int  # of keys, and of values
    layers: int
    stored: int  # bytes of a number in the checkpoint

    @classmethod
    def of(cls, checkpoint: Path) -> Shape:
        config = json.loads((checkpoint / "config.json").read_text())
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        head_dim = config.get("head_dim") or hidden // heads
        query, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
        each = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * inner
        stored = {"float32": 4, "bfloat16": 2}[config["dtype"]]
        return cls(layers * each, hidden * config["vocab_size"], query, kv, layers, stored)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over `rows` tokens, of which `sampled` need logits.

    `pairs` counts the (query token, key) pairs of attention, `kv_tokens` the distinct cached tokens
    that it reads.
    """

    rows: int
    sampled: int
    pairs: int
    kv_tokens: int

    @classmethod
    def of(cls, new: Sequence[int], cached: Sequence[int], shared: int = 0) -> Step:
        """Sequence i adds `new[i]` tokens to `cached[i]`, of which all share the first `shared`."""
        pairs = sum(n * c + n * (n + 1) // 2 for n, c in zip(new, cached, strict=True))
        distinct = sum(cached) - shared * (len(cached) - 1)
        return cls(sum(new), len(new), pairs, distinct)

    def seconds(self, shape: Shape, precision: str, rates: Rates) -> float:
        """The step's floor. Weights are int8 or as stored; KV and attention are float32's.

        Of int4 those of the layers have 4 bits and a factor and an offset for 32, the head 8.
        """
        layers, head = {"int8": (1.0, 1.0), "int4": (5 / 8, 1.0)}.get(
            precision, (shape.stored, shape.stored)
        )
        read = shape.layer_parameters * layers + shape.head_parameters * head * (self.sampled > 0)
        read += self.kv_tokens * 2 * shape.kv_width * shape.layers * 4
        products = 2 * (shape.layer_parameters * self.rows + shape.head_parameters * self.sampled)
        attention = 4 * self.pairs * shape.query_width * shape.layers
        arithmetic = (
            products
            / {
                "float32": rates.float32,
                "bfloat16": max(rates.bfloat16, rates.float32),
                "int8": rates.int8,
                "int4": rates.int8,
            }[precision]
        )
        arithmetic += attention / rates.float32
        return max(read / rates.read, arithmetic)


def steps_of(workload: Workload) -> list[Step]:
    """The fewest steps that compute every token of the workload once."""
    steps: list[Step] = []
    cached = 0  # tokens of each request before this turn
    shared = workload.shared
    for turn in range(workload.turns):
        if turn == 0:
            parts = [Step.of([shared], [0])] if shared else []
            parts.append(
                Step.of([workload.own] * workload.requests, [shared] * workload.requests, shared)
            )
            # One step computes the prefix and all tails, which attend to the prefix.
            steps.append(
                Step(
                    rows=sum(part.rows for part in parts),
                    sampled=workload.requests,
                    pairs=sum(part.pairs for part in parts),
                    kv_tokens=0,
                )
            )
        else:
            # The last token of the previous answer has no KV yet.
            new = [workload.own + 1] * workload.requests
            steps.append(Step.of(new, [cached - 1] * workload.requests, shared))
        cached = cached + workload.own + (shared if turn == 0 else 0)
        for made in range(1, workload.out):
            steps.append(_decode(workload, cached, made))
        cached += workload.out
    return steps


def _decode(workload: Workload, prompt: int, made: int) -> Step:
    """Every line adds a token to the `made` tokens that it has; the last of those has no KV yet."""
    lines = workload.requests * workload.lines
    if workload.lines > 1:  # the lines of a request share its prompt
        own = workload.requests * (prompt - workload.shared) + lines * (made - 1)
    else:
        own = lines * (prompt - workload.shared + made - 1)
    return Step(lines, lines, lines * (prompt + made), workload.shared + own)


def floor_seconds(workload: Workload, shape: Shape, precision: str, rates: Rates) -> float:
    """The floor of a workload in seconds."""
    return sum(step.seconds(shape, precision, rates) for step in steps_of(workload))
