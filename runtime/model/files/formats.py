"""The formats of weights that are read; those of files in the order in which they are looked for.

Imports nothing, so that a list of them is there at once.
"""

from __future__ import annotations

#: Names of files by format, or a pattern of them; one of them must be in a model's folder.
FORMATS = {
    "safetensors": ("model.safetensors.index.json", "model.safetensors"),
    "pickled by torch, without code": ("pytorch_model.bin.index.json", "pytorch_model.bin"),
    "GGUF": ("*.gguf",),
}

#: Families of our own whose GGUF files are read, and what these files call them.
GGUF_FAMILIES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "qwen3_moe": "qwen3moe",
}  # fmt: skip
GGUF_ARCHITECTURES = tuple(dict.fromkeys(GGUF_FAMILIES.values()))
#: Types of matrices in GGUF files: those that the package gguf decodes.
GGUF_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "Q3_K",
    "Q2_K", "IQ4_XS", "IQ4_NL", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S",
    "TQ2_0", "TQ1_0", "MXFP4",
)  # fmt: skip
#: Those of 4 bits in groups, which a CPU multiplies as they are.
GGUF_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
#: Quantised checkpoints by their `quant_method`: how they may be stored.
QUANTIZED = {
    "awq": "4 bits, version gemm",
    "gptq": "2, 4 and 8 bits, also with act order; gptq and gptq_v2",
    "compressed-tensors": "4 and 8 bits packed (W4A16), int8 (W8A8), FP8",
    "fp8": "with scales of blocks, as DeepSeek and Qwen publish it, or of tensors",
    "fbgemm_fp8": "with scales of rows",
    "mxfp4": "gpt-oss",
}
#: Those that are read of every family (see `quantized/method.py`).
STORED = tuple(method for method in QUANTIZED if method != "mxfp4")
