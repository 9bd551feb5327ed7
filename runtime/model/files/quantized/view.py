"""A checkpoint's tensors with quantised weights decoded, each when it is read.

Products of weights in groups take those of 4 and 8 bits as they are stored.
"""

from __future__ import annotations

from pathlib import Path

import torch

from coppice.kernels.cpu.layer.matmul.grouped import BLOCK, Grouped
from coppice.runtime.model.files.quantized import bits
from coppice.runtime.model.files.quantized.method import Method, read_method
from coppice.runtime.model.files.source import Header, TensorSource

# What a weight may be stored as; the first of each form stands for the rest.
_PACKED = ("qweight", "weight_packed")
_PARTS = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_shape", "weight_scale",
    "weight_scale_inv", "weight_zero_point", "weight_g_idx",
)  # fmt: skip
# Scales of activations and of the KV cache, which are made anew here.
_UNUSED = (
    "input_scale", "input_zero_point", "input_scale_ub", "output_scale", "k_scale", "v_scale",
    "k_zero_point", "v_zero_point", "kv_scale",
)  # fmt: skip
_EIGHT = (torch.int8, torch.float8_e4m3fn)


def decoded(source: TensorSource, folder: Path, *, lossless: bool) -> TensorSource:
    """The tensors with weights decoded as the checkpoint's config says; as they are if plain.

    They become the 16-bit type of the other matrices, bfloat16 if there is none; with `lossless`
    float32. Raises ValueError for a method that is not read.
    """
    method = read_method(folder)
    return source if method is None else DecodedSource(source, method, lossless=lossless)


class DecodedSource(TensorSource):
    """The tensors of another source, in which the parts of a quantised weight are one tensor.

    Raises ValueError, naming file and tensor, where a part is missing or has another shape.
    """

    def __init__(self, source: TensorSource, method: Method, *, lossless: bool) -> None:
        self._source, self._method = source, method
        self.stored = method.name
        parts: dict[str, dict[str, str]] = {}
        for name in source.headers:
            module, _, part = name.rpartition(".")
            if part in _PARTS:
                parts.setdefault(module, {})[part] = name
        for module, own in parts.items():
            if not any(part in own for part in _PACKED) and f"{module}.weight" in source.headers:
                own["weight"] = f"{module}.weight"
        taken = {name for own in parts.values() for name in own.values()}
        plain = {
            name: header
            for name, header in source.headers.items()
            if name not in taken and name.rpartition(".")[2] not in _UNUSED
        }
        halves = {each.dtype for each in plain.values() if each.is_matrix}
        half = next(iter(halves)) if len(halves) == 1 else torch.bfloat16
        half = half if half in (torch.float16, torch.bfloat16) else torch.bfloat16
        self._dtype = torch.float32 if lossless else half
        self._parts = {f"{module}.weight": own for module, own in parts.items()}
        self.headers = {**{n: self._header(n, own) for n, own in self._parts.items()}, **plain}
        stored = [source.headers[own["weight"]].dtype for own in parts.values() if "weight" in own]
        self.eight_bit = bool(stored) and len(stored) == len(parts)
        # Groups that products can't take become 16 bits.
        small = [
            self._bits_of(name) == 4 and self._group_of(name) % BLOCK == 0 for name in self._parts
        ]
        self.four_bit = 2 * sum(small) > len(small)

    def _bits_of(self, name: str) -> int:
        """The bits that a number of a quantised weight is stored in."""
        own, columns = self._parts[name], self.headers[name].shape[1]
        if "weight_packed" in own:
            words = self._source.headers[own["weight_packed"]].shape[1]
            return self._bits(words, columns) or self._method.bits
        if "qweight" in own and self._method.form == "gptq":
            return 32 * self._source.headers[own["qweight"]].shape[0] // columns
        return 4 if "qweight" in own else 8

    def _group_of(self, name: str) -> int:
        """The inputs of a group of a quantised weight; 0 where its scales do not tell."""
        own, columns = self._parts[name], self.headers[name].shape[1]
        part = next((each for each in ("scales", "weight_scale") if each in own), None)
        if part is None:
            return 0
        shape = self._source.headers[own[part]].shape
        groups = shape[0 if part == "scales" else -1] if shape else 1
        try:
            return bits.group_of(columns, groups, self._method.group)
        except ValueError:
            return 0  # reading it says so

    @property
    def half_type(self) -> torch.dtype | None:
        return None if self._dtype == torch.float32 else super().half_type

    def _header(self, name: str, own: dict[str, str]) -> Header:
        headers = {part: self._source.headers[each] for part, each in own.items()}
        needs = next(
            (need for main, need in _NEEDED.items() if main in own), ("weight or qweight",)
        )
        missing = [each for each in needs if each not in own]
        if "weight" in own and "weight_scale" not in own and "weight_scale_inv" not in own:
            missing.append("weight_scale")
        first = next(iter(headers.values()))
        if missing:
            raise ValueError(
                f"{first.file}: weight {name} is stored as {', '.join(sorted(own))}; "
                f"{', '.join(missing)} is missing"
            )
        size = sum(each.size for each in headers.values())
        return Header(self._shape(name, headers), self._dtype, first.file, size, self.stored)

    def _shape(self, name: str, headers: dict[str, Header]) -> tuple[int, ...]:
        """The shape of the decoded weight. Raises ValueError where the parts do not fit."""
        if "weight" in headers:
            header = headers["weight"]
            if header.dtype not in _EIGHT or len(header.shape) != 2:
                raise ValueError(
                    f"{header.file}: tensor {name} is {header.dtype} of shape {header.shape}, with "
                    "a scale; it must be int8 or float8_e4m3fn of two dimensions"
                )
            return header.shape
        if "weight_packed" in headers:
            self._matrix(name, headers, "weight_packed", torch.int32)
            found = self._source.read(self._parts[name]["weight_shape"]).tolist()
            rows, columns = found if len(found) == 2 else (0, 0)
            words = headers["weight_packed"].shape
            if rows != words[0] or self._bits(words[1], columns) is None:
                raise ValueError(
                    f"{headers['weight_packed'].file}: weight {name} has shape {found}, and its "
                    f"weight_packed {words}; they must fit with 4 or 8 bits for a number"
                )
            return rows, columns
        self._matrix(name, headers, "qweight", torch.int32)
        scales = self._matrix(name, headers, "scales", None)
        words, per_word = headers["qweight"].shape, 32 // self._method.bits
        if self._method.form == "awq":
            rows, columns = words[1] * per_word, words[0]
        else:
            order = headers.get("g_idx")
            columns = order.shape[0] if order is not None else words[0] * per_word
            rows = words[1]
            if not words[0] or columns % words[0] or 32 * words[0] // columns not in (2, 4, 8):
                raise ValueError(
                    f"{headers['qweight'].file}: qweight of {name} has shape {words} for {columns} "
                    "inputs; they must fit with 2, 4 or 8 bits for a number"
                )
        if (
            scales[1] != rows
            or not scales[0]
            or (self._method.form == "awq" and columns % scales[0])
        ):
            raise ValueError(
                f"{headers['scales'].file}: scales of {name} have shape {scales}; qweight {words} "
                f"asks for a number of groups and {rows}"
            )
        return rows, columns

    def _matrix(
        self, name: str, headers: dict[str, Header], part: str, dtype: torch.dtype | None
    ) -> tuple[int, ...]:
        header = headers[part]
        if len(header.shape) != 2 or (dtype is not None and header.dtype != dtype):
            raise ValueError(
                f"{header.file}: {part} of {name} is {header.dtype} of shape {header.shape}; it "
                f"must have two dimensions{f' and be {dtype}' if dtype else ''}"
            )
        return header.shape

    @staticmethod
    def _bits(words: int, columns: int) -> int | None:
        return next((n for n in (4, 8) if -(-columns * n // 32) == words), None)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._parts:
            return self._source.read(name)
        found = self._read(name)
        return (found.decoded() if isinstance(found, bits.Levels) else found).to(self._dtype)

    def read_grouped(self, name: str) -> Grouped | None:
        if name not in self._parts or "weight" in self._parts[name]:
            return None
        found = self._read(name)
        assert isinstance(found, bits.Levels)
        return found.grouped()

    def _read(self, name: str) -> torch.Tensor | bits.Levels:
        header = self.headers[name]
        part = {each: self._source.read(stored) for each, stored in self._parts[name].items()}
        try:
            found = self._decode(name, part, header)
            if isinstance(found, bits.Levels):
                found.check(header.shape)
            elif found.shape != header.shape:
                raise ValueError(f"they make a weight of {tuple(found.shape)}")
            return found
        except (RuntimeError, IndexError, ValueError) as error:
            shapes = ", ".join(f"{each} {tuple(one.shape)}" for each, one in part.items())
            raise ValueError(
                f"{header.file}: weight {name} cannot be decoded from {shapes} as {self.stored}: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def _decode(
        self, name: str, part: dict[str, torch.Tensor], header: Header
    ) -> torch.Tensor | bits.Levels:
        method = self._method
        if "qweight" in part:
            words, zeros, scales = part["qweight"], part.get("qzeros"), part["scales"]
            if method.form == "awq":
                return bits.awq(words, zeros, scales, group=method.group)
            return bits.gptq(
                words,
                zeros,
                scales,
                part.get("g_idx"),
                bits=self._bits_of(name),
                zeros_less_one=method.zeros_less_one,
                group=method.group,
            )
        zeros = part.get("weight_zero_point")
        if "weight_packed" in part:
            rows, columns = header.shape
            return bits.packed_rows(
                part["weight_packed"],
                part["weight_scale"],
                zeros,
                part.get("weight_g_idx"),
                shape=(rows, columns),
                bits=self._bits_of(name),
                group=method.group,
            )
        scale = part.get("weight_scale_inv", part.get("weight_scale"))
        assert scale is not None
        return bits.scaled(part["weight"], scale, zeros, block=method.block, group=method.group)


_NEEDED = {
    "qweight": ("scales",),
    "weight_packed": ("weight_scale", "weight_shape"),
    "weight": (),
}
