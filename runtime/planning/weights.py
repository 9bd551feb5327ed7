"""Bytes of a model's weights in memory, and of those that a token's step must read."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.runtime.planning.numbers import Numbers

_SCALE = 4  # bytes: each row of a matrix of 8 or 4 bits has a float32
_INT4 = 5 / 8  # bytes of a number: 32 share two of 16 bits


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes in memory; ``read`` are those that a step reads that computes one token."""

    total: int
    read: int
    expert: float  # of one in `chosen` experts of each layer; 0 without experts


def weight_bytes(numbers: Numbers, itemsize: int, quantization: str | None) -> WeightBytes:
    """Bytes of weights, with ``itemsize`` bytes for a number that is not quantized.

    ``quantization`` is None, "int8" (all matrices but embedding and routers; the head is a matrix
    of its own then, and biases float32), "int4" (the same, with a head of int8; of 4-bit
    checkpoints what their own groups take may differ) or "fp8" (the layers' matrices).
    """
    on_cpu = quantization in ("int8", "int4")
    each = {None: itemsize, "int4": _INT4}.get(quantization, 1)
    scale = 0 if quantization is None else _SCALE
    layers = round(numbers.projections * each) + numbers.rows * scale + numbers.rest * itemsize
    layers += numbers.biases * (4 if on_cpu else itemsize)
    experts = round(numbers.experts * each) + numbers.expert_rows * scale
    active = round(numbers.active * each) + numbers.active_rows * scale
    embedding, head = numbers.embedding * itemsize, numbers.head * itemsize
    if on_cpu:
        head = numbers.embedding + numbers.vocab_size * scale
    total = layers + experts + embedding + head
    # Of the embedding a token reads one row; a head that shares it reads all of it.
    read = layers + active + (head or embedding)
    return WeightBytes(total, read, float(active))
