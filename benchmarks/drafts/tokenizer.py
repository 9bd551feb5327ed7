"""A tokenizer of 32,000 tokens for the benchmark, trained on what Python's library holds."""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from common.public_text import library, prose
from cpu.checkpoints import VOCABULARY

FIRST = ("<unk>", "<s>", "</s>")  # as in the checkpoints


def trained(cache: Path) -> Tokenizer:
    """The tokenizer, from `cache` if it is there: byte pairs, as most models have them."""
    file = cache / "speculation-tokenizer.json"
    if not file.exists():
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        texts = [each.read_text(errors="ignore") for each in sorted(library().glob("*.py"))]
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(FIRST),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator([*texts, prose()], trainer)
        cache.mkdir(parents=True, exist_ok=True)
        partial = cache / f"{file.name}.{os.getpid()}"
        made.save(str(partial))
        partial.rename(file)
    return Tokenizer.from_file(str(file))


def tokenizer_folder(cache: Path) -> Path:
    """The same as a folder that an engine's grammars can read."""
    folder = cache / "speculation-tokenizer"
    if not folder.exists():
        unknown, begin, end = FIRST
        PreTrainedTokenizerFast(
            tokenizer_object=trained(cache),
            unk_token=unknown,
            bos_token=begin,
            eos_token=end,
            pad_token=unknown,
        ).save_pretrained(folder)
    return folder
