"""The adapter that a request asks for, as users name it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter of low rank (LoRA; Hu et al. 2021): its name, a number, and where it is.

    The first request that names an adapter loads it; later ones with the same name use it. Raises
    ValueError for a field of another type, an empty one, or a number below 1.

    Attributes:
        lora_name: what requests, reports and `/v1/models` call it.
        lora_int_id: a number of the caller's, unlike that of every other adapter.
        lora_path: a folder as PEFT saves it, or a Hugging Face hub id.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} must be a text that is not empty, got {value!r}")
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"lora_int_id must be an integer of at least 1, got {number!r}")
