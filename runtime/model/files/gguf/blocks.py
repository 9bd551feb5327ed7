"""Tensors of GGUF files: read, decoded some rows at a time, named and laid as in a checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coppice.kernels.cpu.layer.matmul.grouped import Grouped
from coppice.runtime.model.files.gguf.groups import FOUR_BITS, grouped
from coppice.runtime.model.files.gguf.names import processor_of, sources_of
from coppice.runtime.model.files.gguf.package import gguf_package, opened
from coppice.runtime.model.files.source import Header, TensorSource

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Tensors from which the config is made, see `around`; and one that nothing reads.
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Numbers decoded at a time.
_BLOCK = 1 << 22


class GgufSource(TensorSource):
    """Tensors of the GGUF files in a folder, under the names of a checkpoint.

    `wanted` are the names that the model has. Decoded weights have the 16-bit type that the file
    has most of, float16 where it has none; with `lossless`, float32.

    Raises ValueError, naming file and tensor, for what is broken or stored in an unknown way.
    """

    def __init__(self, folder: Path, wanted: Collection[str], *, lossless: bool) -> None:
        files = sorted(folder.glob("*.gguf"))
        self._gguf = gguf_package(files[0])
        self._infos: dict[str, tuple[Path, Any]] = {}
        architecture = ""
        for file in files:
            reader = opened(file)
            if file.is_symlink():  # people know the file where it lies
                file = Path(os.readlink(file))
            named = reader.get_field("general.architecture")
            architecture = architecture or (named.contents() if named else "")
            for each in reader.tensors:
                # Without `data`, which would keep the file mapped.
                about = (each.tensor_type, each.shape.tolist(), each.data_offset, each.n_bytes)
                self._infos[each.name] = file, about
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._processor = processor_of(architecture, config)
        layers = int(config["num_hidden_layers"])
        self._sources = sources_of(wanted, architecture, layers, self._processor)
        kinds = {about[0].name for _, about in self._infos.values() if len(about[1]) > 1}
        quantised = sorted(kinds - set(_PLAIN))
        self._half = torch.bfloat16 if "BF16" in kinds and "F16" not in kinds else torch.float16
        if quantised:
            self.stored = "GGUF's " + ", ".join(quantised)
        self._decoded = torch.float32 if lossless else self._half
        self.headers = {}
        used = {name for name, _ in self._sources.values()}
        place = {stored: index for index, stored in enumerate(self._infos)}
        there = [pair for pair in self._sources.items() if pair[1][0] in place]
        for name, (stored, expert) in sorted(there, key=lambda pair: place[pair[1][0]]):
            self.headers[name] = self._header(stored, expert)
        sizes = {True: 0, False: 0}
        for header in self.headers.values():
            if header.is_matrix:
                sizes[header.stored in FOUR_BITS] += math.prod(header.shape)
        self.four_bit = sizes[True] > sizes[False]
        for stored in self._infos:
            if stored not in used and stored not in _IN_CONFIG:
                self.headers[stored] = self._header(stored, None)

    @property
    def half_type(self) -> torch.dtype | None:
        if self.stored is not None:
            return None if self._decoded == torch.float32 else self._half
        return super().half_type

    def _header(self, stored: str, expert: int | None) -> Header:
        file, (kind, dims, _, size) = self._infos[stored]
        shape = tuple(reversed(dims))
        if expert is not None:
            size //= shape[0]
            shape = shape[1:]
        dtype = _PLAIN.get(kind.name)
        named = None if dtype is not None else kind.name
        return Header(shape, dtype or self._decoded, file, size, named)

    def read(self, name: str) -> torch.Tensor:
        header, (stored, file, kind, data) = self.headers[name], self._bytes(name)
        tensor = self._decode(data, header, kind, f"{file}: tensor {stored}")
        return self._processed(tensor, stored)

    def read_grouped(self, name: str) -> Grouped | None:
        header = self.headers[name]
        if header.stored not in FOUR_BITS or len(header.shape) != 2:
            return None
        stored, _, _, data = self._bytes(name)
        # Rows of some tensors come in another order; what else is done to one is done to floats.
        rows = torch.arange(header.shape[0], dtype=torch.float32)[:, None]
        order = self._processed(rows, stored)
        if order.shape != rows.shape or not torch.equal(order.sort(0).values, rows):
            return None
        made = grouped(torch.from_numpy(data), header.stored, header.shape[0])
        return made if torch.equal(order, rows) else made[order[:, 0].long()]

    def _bytes(self, name: str) -> tuple[str, Path, Any, Any]:
        """A tensor's name in the file, the file, its kind and its bytes."""
        stored, expert = self._sources.get(name, (name, None))
        header = self.headers[name]
        file, (kind, _, offset, _) = self._infos[stored]
        if expert is not None:
            offset += expert * header.size
        data = np.fromfile(file, np.uint8, header.size, offset=offset)
        if data.nbytes != header.size:
            raise ValueError(
                f"{file}: tensor {stored} has {header.size} bytes, and the file holds "
                f"{data.nbytes} of them"
            )
        return stored, file, kind, data

    def _processed(self, tensor: torch.Tensor, stored: str) -> torch.Tensor:
        """A tensor as a checkpoint lays it."""
        made = self._processor.process(tensor, stored, tensor_key_mapping=None)
        found: torch.Tensor = made.weights
        return found

    def _decode(self, data: Any, header: Header, kind: Any, where: str) -> torch.Tensor:
        if header.stored is None:
            return torch.from_numpy(data).view(header.dtype).reshape(header.shape)
        rows = header.shape[0] if len(header.shape) > 1 else 1
        shape = (rows, *header.shape[1:]) if rows > 1 else (1, math.prod(header.shape))
        out = torch.empty(shape, dtype=header.dtype)
        lines = data.reshape(rows, -1)
        step = max(1, _BLOCK // max(1, out[0].numel()))
        for first in range(0, rows, step):
            try:
                part = self._gguf.dequantize(lines[first : first + step], kind)
            except (NotImplementedError, ValueError) as error:
                raise ValueError(
                    f"{where} is stored as {kind.name}, which the package gguf does not decode: "
                    f"{error or 'take a file of another type, such as Q4_K_M or Q8_0'}"
                ) from error
            out[first : first + step].copy_(
                torch.from_numpy(part).reshape(out[first : first + step].shape)
            )
        return out.reshape(header.shape)
