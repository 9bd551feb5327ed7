"""The models of `cpu_peers.py` as checkpoints: two with random weights, or a real one.

S is a Llama in the shape of SmolLM-135M, M a Qwen2 in the shape of Qwen2.5-0.5B, both with 32,000
tokens and a tokenizer of numbers. A checkpoint is written once and used again by later runs. In
bfloat16 its numbers are those of float32, rounded.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MODELS = ("S", "M")
STORED = ("float32", "bfloat16")
VOCABULARY = 32_000
LENGTH = 8192


def checkpoint(name: str, cache: Path, stored: str = "float32") -> Path:
    """The folder of a model's checkpoint below `cache`, written if it does not exist."""
    if name not in MODELS:
        raise ValueError(f"model is {name!r}; it must be one of {', '.join(MODELS)}")
    folder = cache / (f"model-{name}" if stored == "float32" else f"model-{name}-{stored}")
    if not folder.exists():
        # Written under another name and renamed, so that an interrupted run leaves no partial one.
        partial = cache / f"{folder.name}.{os.getpid()}"
        _write_model(name, partial, stored)
        _write_tokenizer(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process has written it meanwhile
            shutil.rmtree(partial)
    return folder


def real_checkpoint(file: Path, cache: Path, stored: str = "float32") -> Path:
    """The folder of a GGUF file's model below `cache`, written if it does not exist.

    Its numbers are rounded to the type `stored`.
    """
    kind = "" if stored == "float32" else f"-{stored}"
    folder = cache / f"model-real-{file.stem}{kind}"
    if not folder.exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        partial = cache / f"{folder.name}.{os.getpid()}"
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # from_pretrained would do the same, and ask for the package accelerate.
        read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
        model.load_state_dict(read["tensors"], strict=False)
        model.tie_weights()
        model.to(getattr(torch, stored)).save_pretrained(partial)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
        partial.rename(folder)
    return folder


def _write_model(name: str, folder: Path, stored: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    common = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if name == "S":
        config = LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            **common,
        )
    else:
        config = Qwen2Config(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            **common,
        )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Biases of zero would not show whether an engine adds them.
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.02)
    model.to(getattr(torch, stored)).save_pretrained(folder)


def _write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with the words `w3`, `w4`, ..., for engines that need one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(3, VOCABULARY))]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
    ).save_pretrained(folder)
