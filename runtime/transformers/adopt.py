"""Puts our linear layers in the place of transformers', and leaves the rest in the right type.

A model's weights arrive in the checkpoint's type. Its linear layers become ours, one by one, so
that products are the same as in our own families: packed, in 16 bits or in 8. What is left of the
weights (norms, biases, experts' stacks) takes the type in which the model computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coppice.kernels.cpu.layer.matmul import float_products
from coppice.runtime.model.layers import Linear, RMSNorm
from coppice.runtime.transformers.network import Network

if TYPE_CHECKING:
    from coppice.kernels.cpu.layer.matmul.float_panels import PackedFloat


class AnyRows(nn.Module):
    """One of our linear layers for inputs of any shape ``[..., in_features]``."""

    def __init__(self, inner: Linear, in_features: int, out_features: int) -> None:
        super().__init__()
        self.inner, self.in_features, self.out_features = inner, in_features, out_features

    @property
    def bias(self) -> nn.Parameter | None:
        return self.inner.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.inner(x.reshape(-1, self.in_features))
        return rows.view(*x.shape[:-1], self.out_features)


class Rows(nn.Module):
    """An embedding whose rows are looked up in the type that its weight is kept in.

    ``tied``: a head that holds the weight; its packed form is read if there is one.
    """

    def __init__(
        self, weight: torch.Tensor | None, tied: Linear | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.own = None if weight is None else nn.Parameter(weight, requires_grad=False)
        self._tied = [] if tied is None else [tied]  # not a child: the head is one already
        self._dtype = dtype

    @property
    def weight(self) -> torch.Tensor:
        """The rows, ``[vocabulary, width]``, where they are not packed."""
        return self._tied[0].weight if self.own is None else self.own

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.own is None and self._tied[0].packed is not None:
            packed = cast("PackedFloat", self._tied[0].packed)
            rows = float_products.rows_of(packed, token_ids.reshape(-1))
            rows = rows.view(*token_ids.shape, -1)
        else:
            rows = F.embedding(token_ids, self.weight)
        return rows.to(self._dtype)


def adopt(
    network: Network, *, linear: type[Linear], dtype: torch.dtype, device: torch.device
) -> None:
    """Replaces the linear layers of ``network`` by ``linear``, and casts the other weights.

    One matrix at a time is in memory beside the weights. Layers that are subclasses of
    transformers' or torch's stay what they are.
    """
    top = network.top
    head = top.get_output_embeddings() if isinstance(top, PreTrainedModel) else top
    tokens = cast("PreTrainedModel", network.base).get_input_embeddings()
    shared = head is not None and getattr(tokens, "weight", None) is head.weight
    found: dict[int, AnyRows] = {}
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if type(module) not in (nn.Linear, Conv1D):
            continue
        if id(module) not in found:
            kind = linear if module is not head else linear.for_head()
            found[id(module)] = _ours(cast("nn.Linear", module), kind, dtype, device)
        _put(network, name, found[id(module)])
    if type(tokens) is nn.Embedding:
        new_head = found.get(id(head))
        tied = shared and new_head is not None and new_head.inner.shares_embedding
        rows = Rows(
            None if tied else tokens.weight.data,
            new_head.inner if tied and new_head is not None else None,
            dtype,
        )
        for name, module in list(network.named_modules(remove_duplicate=False)):
            if module is tokens:
                _put(network, name, rows)
    kept = {id(each) for m in network.modules() if isinstance(m, Linear | Rows | RMSNorm)
            for each in m.parameters(recurse=False)}  # fmt: skip
    for tensor in [*network.parameters(), *network.buffers()]:
        if tensor.is_floating_point() and id(tensor) not in kept and tensor.dtype.itemsize < 4:
            tensor.data = tensor.data.to(dtype)
    network.requires_grad_(False)


def _ours(
    module: nn.Linear, kind: type[Linear], dtype: torch.dtype, device: torch.device
) -> AnyRows:
    weight = module.weight.data
    if isinstance(module, Conv1D):  # what GPT-2 calls a linear layer: its weight is transposed
        weight = weight.t()
    out_features, in_features = weight.shape
    bias = module.bias
    inner = kind(in_features, out_features, bias=bias is not None, dtype=dtype, device=device)
    inner.fill_weight(0, weight)
    if bias is not None:
        inner.fill_bias(0, bias.data)
    return AnyRows(inner, in_features, out_features)


def _put(network: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, module)
