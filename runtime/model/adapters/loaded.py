"""The adapters of one model that are loaded, as matrices on its device, by their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from coppice.runtime.model.adapters.changes import ActingRows, StepChanges, products_for
from coppice.runtime.model.adapters.matrices import Piece
from coppice.runtime.model.config import ModelConfig
from coppice.runtime.startup.room import explained


class LoadedAdapters:
    """Matrices of adapters for the decoder that ``config`` describes.

    Attributes:
        numbers: of the adapters that are loaded.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._products = products_for(dtype, device)
        self._device = device
        kv_width = config.num_kv_heads * config.head_dim
        self._widths = {
            "qkv": config.num_heads * config.head_dim + 2 * kv_width,
            "output": config.hidden_size,
            "gate_up": 2 * config.intermediate_size,
            "down": config.hidden_size,
        }
        self._matrices: dict[int, Any] = {}

    @property
    def numbers(self) -> Sequence[int]:
        return tuple(self._matrices)

    def put(self, number: int, pieces: Sequence[Piece]) -> None:
        """Loads an adapter under a number that no other one ever had.

        Raises ``TooLittleMemory``, a ``ValueError``, if the memory does not suffice.
        """
        size = sum(each.down.nbytes + each.up.nbytes for each in pieces)
        remedy = "Unload another adapter first"
        with explained("the matrices of an adapter", size, self._device, remedy):
            self._matrices[number] = self._products.prepare(pieces, self._widths)

    def move(self, device: torch.device) -> None:
        """Moves all matrices: no step may use them until they are back on the model's device."""
        for number, matrices in self._matrices.items():
            self._matrices[number] = self._products.moved(matrices, device)

    def drop(self, number: int) -> None:
        """Frees an adapter's matrices; no step may use it any more."""
        del self._matrices[number]

    def changes(self, acting: ActingRows, chosen: Sequence[np.ndarray]) -> StepChanges:
        """The changes of a step; ``chosen`` are the rows, in pieces, that go on to the logits."""
        matrices: Sequence[Mapping[Any, Any]] = [self._matrices[each] for each in acting.adapters]
        products = self._products.step(matrices, acting.adapters)
        return StepChanges(products, acting, acting.among(np.concatenate(chosen)))
