"""Whose code computes a model: one of our own families, or transformers' model of it.

Both are the same to the engine: a ``ModelConfig``, and a module with the methods of ``Decoder``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

import torch

from coppice.kernels.cpu.layer.matmul.float_products import multiplies_pairs
from coppice.runtime.config import EngineConfig
from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.config_file import (
    eos_token_ids,
    has_family,
    load_model_config,
    read_config,
)
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.files.gguf.around import file_within
from coppice.runtime.model.parallel.group import ALONE, RankGroup
from coppice.runtime.model.weights import load_decoder, resolve_dtype

if TYPE_CHECKING:
    from coppice.runtime.transformers.describe import Described
    from coppice.runtime.transformers.foreign import ForeignModel

_log = logging.getLogger(__name__)

#: A model with weights. ``ForeignModel`` has the methods of ``Decoder`` that the runner calls.
Model: TypeAlias = Union[Decoder, "ForeignModel"]


@dataclass(frozen=True, slots=True, eq=False)
class Implementation:
    """A checkpoint, and who computes it. ``described`` is None for one of our own families."""

    path: Path
    config: ModelConfig
    described: Described | None

    def dtype(self, options: EngineConfig, device: torch.device) -> torch.dtype:
        """The type of hidden states."""
        if self._rounds_products(options, device):
            return torch.float32
        return resolve_dtype(options.dtype, self.config, device)

    def cache_dtype(self, options: EngineConfig, device: torch.device) -> torch.dtype:
        """The type of the KV cache without ``kv_cache_dtype``: that of products."""
        if self._rounds_products(options, device):
            return torch.bfloat16
        return self.dtype(options, device)

    def _rounds_products(self, options: EngineConfig, device: torch.device) -> bool:
        """Whether products alone are of bfloat16, as the cpu backend of attention needs it.

        Other backends compute all in bfloat16, by torch. With ``auto`` a checkpoint of bfloat16 is
        multiplied so where the compiled products can.
        """
        auto = options.dtype == "auto" and self.config.torch_dtype == torch.bfloat16
        return (
            (options.dtype == "bfloat16" or (auto and multiplies_pairs()))
            and device.type == "cpu"
            and options.attention_backend in ("auto", "cpu")
            and options.quantization is None
            and not options.deterministic
        )

    def load(
        self,
        options: EngineConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup = ALONE,
    ) -> Model:
        """The model with weights, not packed; raises as ``load_decoder`` does.

        Only our own families can be divided among the ranks of a group.
        """
        if self.described is None:
            return load_decoder(
                self.path,
                self.config,
                dtype=dtype,
                device=device,
                load_format=options.load_format,
                quantization=options.quantization,
                deterministic=options.deterministic,
                lossless=options.dtype == "float32",
                bfloat16=self._rounds_products(options, device),
                as_stored=options.dtype == "auto",
                seed=options.seed,
                group=group,
            )
        from coppice.runtime.transformers.loading import load_foreign

        return load_foreign(
            self.path,
            self.described,
            dtype=dtype,
            device=device,
            load_format=options.load_format,
            quantization=options.quantization,
            bfloat16=self._rounds_products(options, device),
            seed=options.seed,
        )


def choose(path: Path, options: EngineConfig) -> Implementation:
    """Our own family where ``options.model_impl`` and the checkpoint allow it, else transformers'.

    With ``auto`` a model of one of our families is ours also where the family refuses its config:
    what it refuses, transformers' model would most often compute wrongly on shared pages.

    Raises ``ValueError`` that names the model and the reason for what neither can run.
    """
    raw = read_config(path)
    if options.model_impl == "coppice" or (options.model_impl == "auto" and has_family(raw)):
        return Implementation(path, load_model_config(path), None)
    gguf = file_within(path)
    if gguf is not None:
        raise ValueError(
            f"model_impl is {options.model_impl!r}; with the GGUF file {gguf} it must be 'auto' or "
            "'coppice', or the model a folder or hub id in Hugging Face's form"
        )
    # Importing transformers' models takes seconds, which our own families do not need.
    from coppice.runtime.transformers.describe import describe

    if options.deterministic:
        raise ValueError(
            "deterministic is True; with transformers' model (model_impl) it must be False: the "
            "results of its operations may depend on the rest of the batch"
        )
    if options.enable_lora:
        raise ValueError(
            "enable_lora is True; with transformers' model (model_impl) it must be False: adapters "
            "change the projections of our own families"
        )
    described = describe(path, raw, eos_token_ids(path, raw))
    _log.info("%s runs through transformers", described.model.architecture)
    return Implementation(path, described.model, described)
