"""An adapter's `adapter_config.json`, as PEFT writes it: which projections it changes, and how.

Field by field this follows PEFT's `LoraConfig`. A field that changes what the adapter computes, and
is not listed here, is refused by name as soon as it has a value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"

# What says nothing about the result of an adapter that is trained.
_IRRELEVANT = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "lora_dropout",
    "megatron_core", "peft_version", "revision", "runtime_config", "task_type",
    "ephemeral_gpu_offload",
    "qalora_group_size", "loftq_config", "corda_config", "lora_ga_config",
})  # fmt: skip
_READ = frozenset({
    "alora_invocation_tokens", "alpha_pattern", "bias", "exclude_modules", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "modules_to_save", "peft_type", "r",
    "rank_pattern", "target_modules", "use_rslora",
})  # fmt: skip
# Ways of beginning the training that change the base model's weights as well.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What an `adapter_config.json` says.

    Attributes:
        rank, alpha: of projections without a pattern.
        rank_stabilised: whether the scale is alpha / sqrt(rank) (Kalajdzievski 2023) instead of
            alpha / rank.
        targets: the projections, as the ends of their names or as one pattern; None: all.
        excluded: projections that it leaves out, likewise.
        layers: to which it is limited; None: all.
        layer_patterns: what stands before a layer's number, as patterns; empty: anything.
        rank_patterns, alpha_patterns: of projections by patterns of their names.
        invocation: the tokens that invoke it (activated LoRA; Greenewald et al. 2025); None: it
            acts on all.
    """

    rank: int
    alpha: float
    rank_stabilised: bool
    targets: tuple[str, ...] | re.Pattern[str] | None
    excluded: tuple[str, ...] | re.Pattern[str]
    layers: tuple[int, ...] | None
    layer_patterns: tuple[str, ...]
    rank_patterns: Mapping[str, int]
    alpha_patterns: Mapping[str, float]
    invocation: tuple[int, ...] | None

    def changes(self, name: str) -> bool:
        """Whether it changes the projection of that name, such as model.layers.0.mlp.up_proj."""
        if _named(self.excluded, name):
            return False
        if self.targets is None:
            return True
        if not _named(self.targets, name):
            return False
        if self.layers is None or isinstance(self.targets, re.Pattern):
            return True
        patterns = self.layer_patterns or (r"[^.]*",)
        found = (re.match(rf".*\.{each}\.(\d+)\.", name) for each in patterns)
        place = next((match for match in found if match), None)
        return place is not None and int(place[1]) in self.layers

    def rank_of(self, name: str) -> int:
        """The rank of a projection."""
        return _by_pattern(self.rank_patterns, name, self.rank)

    def scale_of(self, name: str) -> float:
        """The factor of what it adds to a projection's result."""
        rank = self.rank_of(name)
        alpha = _by_pattern(self.alpha_patterns, name, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def _named(names: tuple[str, ...] | re.Pattern[str], name: str) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(name) is not None
    return any(name == each or name.endswith(f".{each}") for each in names)


def _by_pattern(values: Mapping[str, Any], name: str, default: Any) -> Any:
    found = (key for key in values if re.match(rf"(?:.*\.)?(?:{key.removeprefix('^')})$", name))
    key = next(found, None)
    return default if key is None else values[key]


def read_settings(folder: Path) -> AdapterSettings:
    """Reads an adapter's config. Raises ValueError that names the file, the field and its value."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"{folder} is not the folder of an adapter: it has no {CONFIG_FILE}")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    try:
        if not isinstance(raw, dict):
            raise ValueError("it must be a JSON object")
        return _settings(raw)
    except (ValueError, re.error) as error:
        raise ValueError(f"{file}: {error}") from error


def _settings(raw: Mapping[str, Any]) -> AdapterSettings:
    _refuse(raw)
    rank = _whole("r", raw.get("r", 8), 1)
    layers = raw.get("layers_to_transform")
    if layers is not None:
        layers = tuple(
            _whole("layers_to_transform", each, 0)
            for each in (layers if isinstance(layers, list) else [layers])
        )
    invocation = raw.get("alora_invocation_tokens")
    if invocation is not None:
        if not isinstance(invocation, list) or not invocation:
            raise ValueError(
                f"alora_invocation_tokens must be a list of token ids, got {invocation!r}"
            )
        invocation = tuple(_whole("alora_invocation_tokens", each, 0) for each in invocation)
    return AdapterSettings(
        rank=rank,
        alpha=_number("lora_alpha", raw.get("lora_alpha", 8)),
        rank_stabilised=bool(raw.get("use_rslora")),
        targets=_targets(raw.get("target_modules")),
        excluded=_names("exclude_modules", raw.get("exclude_modules") or []),
        layers=layers or None,
        layer_patterns=_texts("layers_pattern", raw.get("layers_pattern") or []),
        rank_patterns={
            key: _whole(f"rank_pattern[{key}]", value, 1)
            for key, value in _patterns("rank_pattern", raw).items()
        },
        alpha_patterns={
            key: _number(f"alpha_pattern[{key}]", value)
            for key, value in _patterns("alpha_pattern", raw).items()
        },
        invocation=invocation,
    )


def _refuse(raw: Mapping[str, Any]) -> None:
    """Refuses what is not computed here."""
    if raw.get("peft_type") != "LORA":
        raise ValueError(f"peft_type is {raw.get('peft_type')!r}; supported is 'LORA'")
    if (bias := raw.get("bias", "none")) != "none":
        raise ValueError(
            f"bias is {bias!r}; supported is 'none', since others change the base model's biases"
        )
    if saved := raw.get("modules_to_save"):
        raise ValueError(
            f"modules_to_save is {saved!r}; modules beside the low-rank matrices, which replace "
            f"those of the base model, are not supported"
        )
    start = raw.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise ValueError(
            f"init_lora_weights is {start!r}, which changes the base model's weights, too; convert "
            f"the adapter with PEFT (path_initial_model_for_weight_conversion of save_pretrained)"
        )
    if raw.get("use_dora"):
        raise ValueError("use_dora is True; DoRA is not supported: merge it into its base model")
    for name, value in raw.items():
        if name not in _READ | _IRRELEVANT and value not in (None, False, 0, "", [], {}):
            raise ValueError(f"{name} is {value!r}; adapters with it are not supported")


def _targets(given: Any) -> tuple[str, ...] | re.Pattern[str] | None:
    if given == "all-linear":
        return None
    if not given:
        raise ValueError(f"target_modules must name the projections, got {given!r}")
    return _names("target_modules", given)


def _names(field: str, given: Any) -> tuple[str, ...] | re.Pattern[str]:
    return re.compile(given) if isinstance(given, str) else _texts(field, given)


def _texts(field: str, given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise ValueError(f"{field} must be a text or a list of texts, got {given!r}")
    return tuple(texts)


def _patterns(field: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    given = raw.get(field) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{field} must be an object, got {given!r}")
    for key in given:
        re.compile(key)
    return given


def _whole(field: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{field} must be an integer of at least {least}, got {value!r}")
    return value


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{field} must be a number, got {value!r}")
    return float(value)
