"""The number formats of a CPU: what a model's weights take in each, and what each was seen to cost.

The costs are those of one small model, `SmolLM2-135M-Instruct` (`benchmarks/quality.py`; larger
models lose less). They say which format to try, not what another model will lose,
above all in int4: that model was published in such groups of 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from coppice.runtime.planning.numbers import Numbers
from coppice.runtime.planning.weights import weight_bytes

#: The model that the costs were seen on.
SEEN_ON = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Format:
    """A number format, as the options of the engine that choose it, and what it costs and brings.

    ``perplexity_more`` is the ratio of perplexity to float32's, less one. ``prefill``, ``decode_1``
    and ``decode_16`` are float32's time over this format's: of prompts, and of decoding one
    sequence and 16.
    """

    name: str
    flags: str
    perplexity_more: float
    prefill: float
    decode_1: float
    decode_16: float


FORMATS = (
    Format("float32", "--dtype float32", 0.0, 1.0, 1.0, 1.0),
    Format("bfloat16", "--dtype bfloat16", 0.00004, 1.78, 1.05, 1.60),
    Format("int8", "--quantization int8", 0.00412, 2.58, 1.48, 1.90),
    Format("int4", "--quantization int4", 0.00324, 1.24, 1.78, 1.41),
)


def format_bytes(numbers: Numbers, dtype: str) -> dict[str, int]:
    """Bytes of a model's weights on a CPU by the name of the format; ``dtype`` is its config's.

    Weights of 16 bits stay in 16 bits where the engine computes in float32.
    """
    stored = 4 if dtype == "float32" else 2
    return {
        "float32": weight_bytes(numbers, stored, None).total,
        "bfloat16": weight_bytes(numbers, 2, None).total,
        "int8": weight_bytes(numbers, stored, "int8").total,
        "int4": weight_bytes(numbers, stored, "int4").total,
    }
