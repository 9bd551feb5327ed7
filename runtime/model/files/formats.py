"""The formats of weights that `opening` reads, in the order in which it looks for them.

Imports nothing, so that a list of them is there at once.
"""

from __future__ import annotations

#: Names of files by format, or a pattern of them; one of them must be in a model's folder.
FORMATS = {
    "safetensors": ("model.safetensors.index.json", "model.safetensors"),
    "pickled by torch, without code": ("pytorch_model.bin.index.json", "pytorch_model.bin"),
    "GGUF": ("*.gguf",),
}

#: Families of our own whose GGUF files are read (transformers' table of architectures has them).
GGUF_FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "qwen3_moe",
)  # fmt: skip
#: Ways of storing fewer bits that are read of every family (see `quantized/method.py`).
STORED = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8")
