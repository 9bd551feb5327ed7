"""Attention of transformers' models on our pages, by our plan: a function that they call.

transformers lets a function stand in for the attention of its models: ``AttentionInterface``. Ours
is registered as ``NAME``. transformers makes masks only for the names that its mask interface
knows, and this one it does not know: a model that runs with it makes none. A model calls the
function once for each layer, with the queries, keys and values of all rows of a step. Which step
this is, the function reads from ``running``, which is one for each thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from coppice.kernels.attention.interface import AttentionBackend, LayerCache

#: What transformers' models call our attention.
NAME = "coppice"


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What one call of attention in a forward pass asks for; most models make one a layer.

    Attributes:
        owner: the name of the class of the module that calls it.
        num_heads, num_kv_heads: of queries, and of keys and values.
        key_dim, value_dim: numbers of a head of queries and keys, and of one of values.
        scale: the factor of queries times keys.
        sliding_window: tokens that a token attends to, itself included; None for all.
        softcap: a bound c of the products: each becomes c * tanh(x / c); None: none.
        sinks: whether each head has a sink.
    """

    owner: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: bool


class PagedStep:
    """Attention of one step over pages, layer by layer, in the order of the model's calls.

    ``layers`` are the facts of these calls; the other arguments are those of
    ``Decoder.hidden_states``.
    """

    def __init__(
        self,
        layers: Sequence[LayerFacts],
        slots: torch.Tensor,
        kv: Sequence[LayerCache],
        attention: AttentionBackend,
        prepared: Any,
    ) -> None:
        self._layers, self._kv = layers, kv
        self._slots, self._attention, self._prepared = slots, attention, prepared
        self._next = 0

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """The heads' results ``[T, num_heads, value_dim]``; writes keys and values.

        ``query`` is ``[1, num_heads, T, key_dim]``; ``key`` and ``value`` have KV heads.
        """
        layer, cache = self._layers[self._next], self._kv[self._next]
        self._next += 1
        width = cache.k.shape[-1]
        q, k, v = (_rows(each, width) for each in (query, key, value))
        self._attention.write_kv(k, v, cache, self._slots)
        out, lse = self._attention.attend(
            q,
            k,
            v,
            cache,
            self._prepared,
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            logit_softcap=layer.softcap,
            lse_read=sinks is not None,
        )
        if sinks is not None:
            # The keys' part of the softmax's sum, which the sink makes larger.
            share = torch.sigmoid(lse - sinks.float())
            out = out * share[..., None].to(out.dtype)
        return out if layer.value_dim == width else out[..., : layer.value_dim]


class LonelyStep:
    """Attention in which each row sees itself alone, without pages: to test the rest of a model."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As ``PagedStep.attend``: the value of a row's own token, for each head."""
        groups = query.shape[1] // value.shape[1]
        return value[0].transpose(0, 1).repeat_interleave(groups, dim=1)


class _Running(threading.local):
    """The step that this thread computes."""

    step: PagedStep | LonelyStep | None = None


running = _Running()


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' models call for each layer: the heads' results ``[1, T, heads, dim]``.

    The other arguments were read when the model was described; see ``probe``.
    """
    assert running.step is not None, "a model with this attention runs only within a step"
    return running.step.attend(query, key, value, s_aux)[None], None


def _rows(heads: torch.Tensor, width: int) -> torch.Tensor:
    """``[1, H, T, D]`` as ``[T, H, width]``, each row contiguous; what is added is zeros."""
    rows = heads[0].transpose(0, 1)
    dim = rows.shape[-1]
    if dim != width:
        return F.pad(rows, (0, width - dim))
    if rows.stride(2) != 1 or rows.stride(1) != dim:
        # Not `contiguous`, which leaves the stride of a single head as it is.
        return rows.reshape(len(rows), -1).view(rows.shape)
    return rows
