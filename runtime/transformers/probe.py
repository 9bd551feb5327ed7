"""Runs a model of transformers without weights, and notes what it asks of attention.

The model is made on torch's meta device, which knows shapes and no numbers, so that this takes no
memory, and it runs over three tokens with an attention function and a mask function that take
notes. What a mask allows is read from the function that transformers gives to make it from.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from coppice.runtime.transformers.attention import LayerFacts
from coppice.runtime.transformers.network import Network
from coppice.runtime.transformers.refusals import Refused, check_parts

_NAME = "coppice_probe"
# Arguments of attention that are known, or that change nothing here: there is no dropout, weights
# are not returned, and positions have been used before.
_KNOWN = frozenset({
    "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "dropout",
    "use_cache", "cache_position", "output_attentions", "training", "deterministic", "layer_idx",
    "position_embeddings",
})  # fmt: skip
_TOKENS = 3
# Positions at which a mask is read: windows of as many tokens or more are none.
_POSITIONS = 1 << 18


class Probe:
    """What one forward pass on the meta device shows of a model of ``auto_class`` and ``config``.

    ``head`` is that of ``ModelConfig``.

    Attributes:
        network: the model, without numbers.
        layers: the facts of each call of attention, in order.
        hidden_size: numbers of a state.
        architecture: the name of its class.
        num_results: the number of logits or labels; 0 for a bare model.

    Raises ``Refused`` with the reason for a model that cannot run on pages.
    """

    def __init__(self, auto_class: Any, config: PreTrainedConfig, head: str = "text") -> None:
        self.layers: list[LayerFacts] = []
        self._masks: list[tuple[torch.Tensor, int | Refused | None]] = []
        try:
            with torch.device("meta"):
                model = auto_class.from_config(copy.deepcopy(config), attn_implementation=_NAME)
        except KeyError as error:
            if error.args != (_NAME,):
                raise Refused(f"transformers does not make it ({_brief(error)})") from error
            raise Refused(
                "its attention is its own: it does not call transformers' attention interface"
            ) from None
        except Exception as error:  # whatever a model's own code raises
            raise Refused(f"transformers does not make it ({_brief(error)})") from error
        self.architecture = type(model).__name__
        check_parts(config, model.eval())
        if model._can_set_experts_implementation():
            model.set_experts_implementation(_NAME)
        self.network = Network(model, head)
        places = torch.arange(_TOKENS, device="meta")
        _active.probe = self
        try:
            with torch.inference_mode():
                mask = torch.ones(1, _TOKENS, dtype=torch.int64, device="meta")
                states = self.network.states(places, places, attention_mask=mask)
                self.hidden_size = states.shape[-1]
                self.num_results = 0
                if self.network.top is not None:
                    calls = len(self.layers)
                    self.num_results = self.network.results(states).shape[-1]
                    if len(self.layers) != calls:
                        raise Refused(
                            "its class for text does not take states from the model in it"
                        )
        except Refused:
            raise
        except Exception as error:  # whatever a model's own code raises
            raise Refused(
                f"it does not run on the shapes of a step, without a cache of its own "
                f"({_brief(error)})"
            ) from error
        finally:
            _active.probe = None

    def note_mask(self, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Stands for the mask that ``function`` describes."""
        try:
            found: int | Refused | None = _window(function)
        except Refused as refused:  # of no matter if no layer uses it
            found = refused
        mask = torch.empty(1, 1, _TOKENS, _TOKENS, device="meta")
        self._masks.append((mask, found))
        return mask

    def note_attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Notes one call of attention; returns a result of its shape."""
        owner = type(module).__name__
        for name, given in options.items():
            if name not in _KNOWN and given is not None and given is not False:
                raise Refused(f"{owner} gives attention {name}, which it does not take here")
        if query.shape[2] != _TOKENS or key.shape[2] != _TOKENS or value.shape[2] != _TOKENS:
            raise Refused(
                f"{owner} attends from {query.shape[2]} to {key.shape[2]} tokens in a step of "
                f"{_TOKENS}: it compresses tokens, or attends to others than the sequence's own"
            )
        scale = options.get("scaling")
        softcap, sinks = options.get("softcap"), options.get("s_aux")
        self.layers.append(
            LayerFacts(
                owner=owner,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                sliding_window=self._window_of(module, mask, options),
                softcap=None if softcap is None else float(softcap),
                sinks=sinks is not None,
            )
        )
        return query.new_empty(1, _TOKENS, query.shape[1], value.shape[3])

    def _window_of(
        self, module: nn.Module, mask: torch.Tensor | None, options: dict[str, Any]
    ) -> int | None:
        owner = type(module).__name__
        if mask is None:
            causal = options.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            if not causal:
                raise Refused(f"tokens of {owner} attend to later ones (is_causal is False)")
            window = options.get("sliding_window")
            return window if window is None else int(window)
        for made, found in self._masks:
            if made is mask:
                if isinstance(found, Refused):
                    raise Refused(f"{owner} has a mask that {found}")
                return found
        raise Refused(
            f"{owner} adds numbers of its own to its mask, such as ALiBi's, or makes a mask itself"
        )


def _window(function: Callable[..., torch.Tensor]) -> int | None:
    """The sliding window of a mask, None for all earlier tokens; raises ``Refused`` for others."""
    keys = torch.arange(_POSITIONS)
    zero = torch.zeros((), dtype=torch.int64)
    lengths = []
    for position in (_POSITIONS - 2, _POSITIONS // 2 - 5):
        try:
            seen = function(zero, zero, torch.tensor(position), keys).expand(_POSITIONS)
        except Exception as error:  # one that reads tensors of the step, which have no numbers
            raise Refused("depends on more than positions, such as chunks or blocks") from error
        if bool(seen[position + 1 :].any()):
            raise Refused("lets tokens attend to later ones")
        length = int(seen.sum())
        if not bool(seen[position - length + 1 : position + 1].all()):
            raise Refused("leaves out tokens between others")
        lengths.append(None if length == position + 1 else length)
    if lengths[0] != lengths[1]:
        raise Refused("is neither causal nor a sliding window")
    return lengths[0]


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


class _Active(threading.local):
    """The probe that runs in this thread."""

    probe: Probe | None = None


_active = _Active()


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    assert _active.probe is not None
    return _active.probe.note_attention(module, query, key, value, attention_mask, options), None


def _mask(*, mask_function: Callable[..., torch.Tensor], **_: Any) -> torch.Tensor:
    assert _active.probe is not None
    return _active.probe.note_mask(mask_function)


def _experts(module: nn.Module, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Stands for the experts, whose choice of rows has no shape without numbers."""
    return torch.empty_like(states)


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)
ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts)
