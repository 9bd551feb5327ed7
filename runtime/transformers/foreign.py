"""A model of transformers with weights, as the runner uses every model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from coppice.kernels.attention.interface import AttentionBackend, LayerCache
from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.decoder import Changes
from coppice.runtime.model.layers import Linear
from coppice.runtime.transformers.attention import (
    NAME,
    LayerFacts,
    LonelyStep,
    PagedStep,
    attend,
    running,
)
from coppice.runtime.transformers.network import Network
from coppice.runtime.transformers.program.compiled import CompiledNetwork, compile_network

AttentionInterface.register(NAME, attend)


class ForeignModel(nn.Module):
    """transformers' model over pages: what ``Decoder`` is for our own families.

    ``layers`` are the facts of the calls of attention in ``network``, whose weights are complete.
    """

    #: A pass as one call, if there is one; see ``one_call``.
    compiled: CompiledNetwork | None = None

    def __init__(self, config: ModelConfig, layers: Sequence[LayerFacts], network: Network) -> None:
        super().__init__()
        self.config, self._layers, self.network = config, layers, network

    def pack(self) -> None:
        """See ``Decoder.pack``."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def one_call(self, attention: AttentionBackend) -> CompiledNetwork | None:
        """A pass as one compiled call, where it can be one. The weights are packed and stay."""
        self.network.shorten(self.config.hidden_size)
        return compile_network(self.config, self._layers, self.network, attention)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: Sequence[LayerCache],
        attention: AttentionBackend,
        prepared: Any,
        logit_rows: torch.Tensor,
        changes: Changes | None = None,
    ) -> torch.Tensor:
        """See ``Decoder.forward``."""
        hidden = self.hidden_states(
            token_ids, positions, slots, kv, attention, prepared, logit_rows, changes
        )
        return self.logits(hidden)

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: Sequence[LayerCache],
        attention: AttentionBackend,
        prepared: Any,
        logit_rows: torch.Tensor | None,
        changes: Changes | None = None,
    ) -> torch.Tensor:
        """See ``Decoder.hidden_states``; the last layer computes all rows, without adapters."""
        assert changes is None, "adapters were refused"
        if self.compiled is not None:
            states = self.compiled.hidden_states(token_ids, positions, slots, kv, prepared)
            return states if logit_rows is None else states[logit_rows]
        running.step = PagedStep(self._layers, slots, kv, attention, prepared)
        try:
            states = self.network.states(token_ids, positions)
        finally:
            running.step = None
        return states if logit_rows is None else states[logit_rows]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Decoder.logits``."""
        if not len(hidden):
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        logits = self.network.results(hidden)
        return logits if out is None else out.copy_(logits)

    def scores(self, hidden: torch.Tensor, tokens: tuple[int, int | None] | None) -> torch.Tensor:
        """See ``Decoder.scores``."""
        if tokens is None:
            return self.network.results(hidden)
        logits = self.logits(hidden)
        first, second = tokens
        found = logits[:, first : first + 1]
        return found if second is None else found - logits[:, second : second + 1]

    @torch.inference_mode()
    def mixes_tokens(self) -> bool:
        """Whether rows affect each other other than by attention, as a convolution makes them.

        Runs a few tokens together and each alone, with attention that lets each row see itself
        only: two or three small steps. Two results may differ, by a choice of experts that was
        nearly a tie.
        """
        device = next(self.parameters()).device
        size = min(self.config.vocab_size, 1 << 16)
        tokens = torch.arange(1, 6, device=device) * (size // 7)
        places = torch.arange(5, device=device) % self.config.max_position
        running.step = LonelyStep()
        try:
            together = self.network.states(tokens, places).float()
            alone = torch.cat([
                self.network.states(tokens[i : i + 1], places[i : i + 1]).float() for i in range(5)
            ])  # fmt: skip
        finally:
            running.step = None
        apart = (together - alone).abs().amax(dim=1)
        return int((apart > 0.05 * alone.abs().amax(dim=1)).sum()) > 2
