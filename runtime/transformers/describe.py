"""Describes a checkpoint that transformers' model will run, as the engine describes all models.

From `config.json` alone: a probe without weights shows what the layers ask of attention. Whatever
cannot run on pages is refused by name, see ``kinds``.

Keys and values of different sizes, as in multi-head latent attention, run: pages are as wide as the
larger, the other is padded with zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers import AutoModelForSequenceClassification as AutoClassifier

from coppice.runtime.model.config import DTYPE_NAMES, LayerSpec, ModelConfig, TensorNames
from coppice.runtime.transformers.attention import LayerFacts
from coppice.runtime.transformers.probe import Probe
from coppice.runtime.transformers.refusals import Refused, check_config, check_layers

_log = logging.getLogger(__name__)

# Where configs say how long a sequence may be.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_UNBOUNDED = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A checkpoint that transformers' model can run on pages.

    Attributes:
        model: what the engine needs to know of it.
        layers: the calls of attention in a forward pass, in order.
        config, auto_class: transformers' config, and the class that makes the model.
        matrices, others: numbers in weights of linear layers, and in all other weights.
    """

    model: ModelConfig
    layers: tuple[LayerFacts, ...]
    config: PreTrainedConfig
    auto_class: Any
    matrices: int
    others: int


def describe(path: Path, raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Described:
    """What the folder ``path`` holds, whose `config.json` has the content ``raw``.

    Takes about the time that transformers needs to make the model without weights. Raises
    ``ValueError`` with the name of the model and the reason if it cannot run.
    """
    named = str((raw.get("architectures") or [raw.get("model_type")])[0])
    try:
        return _describe(path, raw, named, eos_token_ids)
    except Refused as refused:
        raise ValueError(f"{named} cannot run through transformers: {refused}") from refused


def _describe(
    path: Path, raw: Mapping[str, Any], named: str, eos_token_ids: tuple[int, ...]
) -> Described:
    config, auto_class, head = _classes(path, raw, named)
    longest = _length(config)
    probe = Probe(auto_class, config, head)
    facts = probe.layers
    check_layers(config, facts)
    first = facts[0]
    dim = max(max(each.key_dim, each.value_dim) for each in facts)
    linears = {id(each.weight): each.weight.numel() for each in _linears(probe.network)}
    weights = {id(each): each.numel() for each in probe.network.parameters()}
    matrices = sum(linears.values())
    model = ModelConfig(
        architecture=probe.architecture,
        implementation="transformers",
        vocab_size=_vocabulary(config, probe if head == "text" else None),
        hidden_size=probe.hidden_size,
        intermediate_size=_inner(probe.network.base),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=dim + dim % 2,
        rms_norm_eps=0.0,
        attention_scale=first.scale,
        ropes=(),
        max_position=longest,
        tie_word_embeddings=False,
        layers=tuple(
            LayerSpec(sliding_window=each.sliding_window, sinks=each.sinks) for each in facts
        ),
        names=TensorNames(),
        eos_token_ids=eos_token_ids,
        dtype=_dtype(config),
        attention_softcap=first.softcap,
        head=head,
        num_labels=probe.num_results if head == "labels" else 0,
    )
    others = sum(weights.values()) - matrices
    return Described(model, tuple(facts), config, auto_class, matrices, others)


def _classes(path: Path, raw: Mapping[str, Any], named: str) -> tuple[PreTrainedConfig, Any, Any]:
    """transformers' config and the class that makes the model, and what its head is for."""
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"].get("quant_method")
        raise Refused(
            f"its weights are stored quantized (quant_method {method!r}); give an unquantized "
            "checkpoint"
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        lines = str(error).strip().splitlines()
        if raw.get("auto_map"):
            raise Refused(
                "it needs code from its checkpoint (auto_map in config.json), which is not run"
            ) from error
        raise Refused(f"its config.json is not read: {lines[0] if lines else error!r}") from error
    check_config(config)
    head: Any = "text"
    auto_class: Any = AutoModelForCausalLM
    if named.endswith("ForSequenceClassification"):
        head, auto_class = "labels", AutoClassifier
    elif named.endswith("Model") and not named.endswith("LMHeadModel"):
        head, auto_class = "none", AutoModel
    elif raw.get("architectures") and not named.endswith(("ForCausalLM", "LMHeadModel")):
        raise Refused(
            f"architectures is {raw['architectures']}; models for text (ForCausalLM), classifiers "
            "(ForSequenceClassification) and bare models run"
        )
    if type(config) not in auto_class._model_mapping:
        raise Refused(
            f"transformers has no {auto_class.__name__.removeprefix('Auto')} of model_type "
            f"{config.model_type!r}"
        )
    return config, auto_class, head


def _length(config: PreTrainedConfig) -> int:
    """The longest sequence in tokens; refuses rotations that depend on a sequence's length."""
    longest = next(
        (value for name in _LENGTHS if isinstance(value := getattr(config, name, None), int)),
        _UNBOUNDED,
    )
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        if kind == "dynamic":
            raise Refused(
                "its rotation depends on the length of the sequence (rope_type 'dynamic'), so that "
                "a prefix has other keys in each request"
            )
        if kind == "longrope":  # above it keys depend on the length
            longest = min(longest, original or longest)
        elif kind == "linear":
            longest = int(longest * rope.get("factor", 1))
    return longest


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of each rotation, which may be given by kind of layer."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters
    for each in parameters.values():
        yield from _ropes(each)


def _vocabulary(config: PreTrainedConfig, probe: Probe | None) -> int:
    return int(config.vocab_size) if probe is None else probe.num_results


def _dtype(config: PreTrainedConfig) -> str:
    declared = getattr(config, "dtype", None) or torch.float32
    name = str(declared).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise Refused(f"its dtype is {declared}; supported are {', '.join(DTYPE_NAMES)}")
    return name


def _linears(network: nn.Module) -> list[nn.Linear]:
    return [each for each in network.modules() if type(each) is nn.Linear]


def _inner(base: nn.Module) -> int:
    """The widest projection of the layers, for an estimate of what a step takes."""
    return max((each.out_features for each in _linears(base)), default=1)
