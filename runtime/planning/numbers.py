"""How many numbers a model's weights are, by what becomes of them when they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.runtime.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of all weights of a model.

    Attributes:
        projections: of the layers' matrices, without experts; these are what is quantized.
        rows: of these matrices; an 8-bit one has a scale for each.
        experts, expert_rows: the same of all experts.
        active, active_rows: those of the experts that compute for one token.
        biases: of projections and experts.
        rest: routers, norms and sinks, and a classifier's head.
        embedding: of the embedding, and of a head that is made of it.
        head: of the head for text, where it is not the embedding; else 0.
        vocab_size: rows of the head.
    """

    projections: int
    rows: int
    experts: int
    expert_rows: int
    active: int
    active_rows: int
    biases: int
    rest: int
    embedding: int
    head: int
    vocab_size: int

    @property
    def total(self) -> int:
        """Those of the checkpoint: parameters, as transformers counts them."""
        layers = self.projections + self.experts + self.biases + self.rest
        return layers + self.embedding + self.head

    @property
    def used(self) -> int:
        """The parameters that compute for one token."""
        return self.total - self.experts + self.active


def count(model: ModelConfig) -> Numbers:
    """The numbers of a model's weights."""
    hidden, dim = model.hidden_size, model.head_dim
    queries, keys = model.num_heads * dim, model.num_kv_heads * dim
    qkv = queries + 2 * keys
    projections = rows = experts = expert_rows = active = active_rows = biases = 0
    rest = hidden  # the last norm
    for layer in model.layers:
        projections += hidden * (qkv + queries)
        rows += qkv + hidden
        biases += qkv * layer.qkv_bias + hidden * layer.output_bias
        if layer.experts is None:
            projections += 3 * hidden * model.intermediate_size
            rows += 2 * model.intermediate_size + hidden
            biases += (2 * model.intermediate_size + hidden) * layer.mlp_bias
        else:
            each = layer.experts
            one, own = 3 * hidden * each.inner, 2 * each.inner + hidden
            experts, expert_rows = experts + each.count * one, expert_rows + each.count * own
            active, active_rows = active + each.chosen * one, active_rows + each.chosen * own
            biases += each.count * own * each.biased
            rest += each.count * (hidden + each.biased)  # the router
        rest += hidden * (4 if layer.norms == "both" else 2)
        rest += {"head": 2 * dim, "all": queries + keys, None: 0}[layer.qk_norm]
        rest += model.num_heads * layer.sinks
    if model.head == "labels":
        rest += model.num_labels * hidden
    words = model.vocab_size * hidden
    return Numbers(
        projections, rows, experts, expert_rows, active, active_rows, biases, rest,
        words, 0 if model.tie_word_embeddings else words, model.vocab_size,
    )  # fmt: skip
