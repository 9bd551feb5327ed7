"""How many sequences and tokens a step has by default, from a device's memory and rates.

On a GPU a step of few rows takes the time of reading the weights, whatever it computes. From
``balance`` rows on, products take longer than that: this is how many sequences decode at once. A
step with prefills has many times as many tokens, so that reading the weights and starting kernels
are a small part of it, but no more than it computes in ``STEP_SECONDS``, since the sequences that
decode wait for it. Both stay within a part of the memory, and are no less than on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coppice.runtime.model.config import ModelConfig
from coppice.runtime.planning.numbers import Numbers

#: The most sequences and tokens of a step by default on a CPU.
CPU_SEQS, CPU_TOKENS = 64, 1024

#: Seconds that the products of a step with prefills may take, at `PRODUCT_PART` of the rate.
STEP_SECONDS = 0.25
PRODUCT_PART = 0.5
#: Tokens of a step for each row at which products take as long as reading the weights.
TOKENS_A_ROW = 32
#: More sequences would wait for their KV, not for the weights.
MOST_SEQS = 512
#: Part of the memory that the logits of a step, and the activations of its tokens, may take.
MEMORY_PART = 1 / 16

#: Bytes that a step needs at most for one logit while it samples: logits in the model's type and
#: in float32, divided by their temperature, sorted with their places, as probabilities and their
#: sums in float64.
BYTES_A_LOGIT = 48


@dataclass(frozen=True, slots=True)
class Rates:
    """A device: bytes of memory, bytes that it reads a second, FLOP a second of 16-bit products."""

    memory: int
    bandwidth: float
    products: float

    @property
    def balance(self) -> float:
        """Rows of a product that take as long as reading its 16-bit weights."""
        return self.products / self.bandwidth


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The most sequences and tokens of a step."""

    seqs: int
    tokens: int


def step_sizes(model: ModelConfig, numbers: Numbers, rates: Rates, itemsize: int) -> StepSizes:
    """What a step of a model, with activations of ``itemsize`` bytes, has by default on a GPU."""
    most = int(rates.memory * MEMORY_PART)
    rows = most // (model.vocab_size * BYTES_A_LOGIT)
    seqs = max(CPU_SEQS, min(_nearest(rates.balance), MOST_SEQS, _at_most(rows)))
    computed = STEP_SECONDS * PRODUCT_PART * rates.products / (2 * numbers.used)
    room = most // token_bytes(model, itemsize)
    tokens = min(_nearest(TOKENS_A_ROW * rates.balance), _nearest(computed), _at_most(room))
    return StepSizes(seqs, max(CPU_TOKENS, tokens))


def token_bytes(
    model: ModelConfig, itemsize: int, *, partials: int = 2, quantized: bool = False
) -> int:
    """An upper estimate of the bytes that a token of a step takes beside its KV.

    Activations of a layer that exist at the same time: inputs, norm and residual; queries, keys and
    values, before and after rotation; the result of attention, with ``partials`` results in
    float32; gate, up and their product; the inputs of 8-bit products.
    """
    queries = model.num_heads * model.head_dim
    qkv = queries + 2 * model.num_kv_heads * model.head_dim
    attention = (2 * qkv + queries) * itemsize + partials * queries * 4
    feed_forward = 3 * model.intermediate_size * itemsize
    token = 3 * model.hidden_size * itemsize + max(attention, feed_forward)
    if quantized:
        token += max(model.hidden_size, queries, model.intermediate_size)
    return token


def _nearest(value: float) -> int:
    """The power of two that is nearest by its logarithm."""
    return int(2 ** round(math.log2(max(value, 1.0))))


def _at_most(value: int) -> int:
    """The largest power of two that is no more than that, at least 1."""
    return 1 << max(0, max(value, 1).bit_length() - 1)
