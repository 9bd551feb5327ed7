"""A model of transformers in two parts: tokens to states, and states to logits or scores.

transformers' classes for text have one call for both. Here the first part is the model inside
(``base_model_prefix``), and the second is the whole class with that model replaced by one that
returns given states. So whatever a class does with its states, a scale or a bound of its logits,
is done, and only for the rows that need it.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from coppice.runtime.transformers.refusals import Refused


class Network(nn.Module):
    """``model`` in two parts. Raises ``Refused`` for one that cannot be split.

    Attributes:
        base: tokens to states.
        top: states to logits: ``model``, whose own ``base`` returns what it is given; of a
            classifier the layer that makes scores; None for a bare model.
    """

    top: nn.Module | None

    def __init__(self, model: PreTrainedModel, head: str) -> None:
        super().__init__()
        self._kind: type[ModelOutput] | None = None
        self._dtype = torch.float32
        self._head: list[nn.Module] = []  # not a child: it is one of the top's
        if head == "none":
            self.base, self.top = model, None
        else:
            name, self.base = _inside(model)
            if head == "labels":
                self.top = getattr(model, "score", None)
                if not isinstance(self.top, nn.Linear):
                    raise Refused("its classifier's head is no linear layer (score)")
            else:
                self.top, self._given = model, _Given(self.base)
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, self._given)
        if "position_ids" not in inspect.signature(self.base.forward).parameters:
            raise Refused(
                "it takes no position_ids, and a step has tokens of several sequences at positions "
                "of their own"
            )

    def states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """The last states ``[T, hidden]`` of tokens, both int64 ``[T]``."""
        out = self.base(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **options
        )
        self._kind, self._dtype = type(out), out.last_hidden_state.dtype
        return out.last_hidden_state[0]

    def results(self, states: torch.Tensor) -> torch.Tensor:
        """Logits or scores, float32 ``[R, results]``, of states ``[R, hidden]``, R above 0.

        States have been made before.
        """
        assert self.top is not None, "a bare model has no logits"
        if self._head:
            return cast("torch.Tensor", self._head[0](states)).float()
        if not isinstance(self.top, PreTrainedModel):
            return self.top(states).float()
        assert self._kind is not None
        self._given.output = self._kind(last_hidden_state=states[None])
        try:
            tokens = states.new_zeros((1, len(states)), dtype=torch.int64)
            out = self.top(input_ids=tokens, use_cache=False)
        finally:
            self._given.output = None
        return out[0][0].float()

    @torch.no_grad()
    def shorten(self, hidden_size: int) -> None:
        """Lets ``results`` call the head itself where the class does nothing but that.

        That is tried on random states ``[3, hidden_size]``. A step of few tokens then spends less
        time on calls. States have been made before.
        """
        if not isinstance(self.top, PreTrainedModel):
            return
        head = self.top.get_output_embeddings()
        if isinstance(head, nn.Module):
            weight = next(self.parameters(), torch.empty(0))
            states = torch.randn(3, hidden_size, generator=torch.Generator().manual_seed(0))
            states = states.to(weight.device, self._dtype)
            if torch.equal(self.results(states), head(states).float()):
                self._head = [head]


class _Given(nn.Module):
    """Stands for the model inside: returns the output that it was given."""

    def __init__(self, stands_for: nn.Module) -> None:
        super().__init__()
        self.output: ModelOutput | None = None
        # Not a child, so that each weight has one name.
        object.__setattr__(self, "_stands_for", stands_for)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_stands_for"], name)

    def forward(self, *args: Any, **options: Any) -> ModelOutput:
        assert self.output is not None
        return self.output


def _inside(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """The model inside a class for text that makes states, and its name there."""
    inner: Any = model.get_decoder()
    if not isinstance(inner, nn.Module) or inner is model:
        inner = getattr(model, model.base_model_prefix or "", None)
    for name, module in model.named_modules():
        if name and module is inner:
            return name, module
    raise Refused("no model that makes states is found inside its class")
