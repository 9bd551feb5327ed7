"""The demo model's tokenizer: byte-level BPE in which every word of the handbooks is one token.

Other text is encoded by bytes and a few hundred merges learned from handbooks; the words of the
generator are added whole. They need no merges, because the BPE looks a piece up in its vocabulary
before it merges (`ignore_merges`, as in Llama 3's tokenizer).

A space is added before every text (as in Llama 2's tokenizer) and removed when decoding, so that a
word is the same token at the start of an answer as inside the document. Without it the model must
learn for each word to answer " Halden" by "Halden", which was most of what it had to learn: it soon
copied numbers, but hardly any words.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from coppice.frontend.demo import words as demo_words
from coppice.frontend.demo.facts import ask, make_document

VOCAB_SIZE = 2048
PAD, BOS, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|bos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Digits are split in pairs from the left: "14.75" has three tokens, and so has "QX-48".
_PIECES = r"'s| ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(seed: int) -> Tokenizer:
    """Trains the tokenizer on handbooks of the train split; deterministic for a seed."""
    splitter = Sequence(
        [Split(Regex(_PIECES), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    learner = Tokenizer(BPE())
    learner.normalizer = Prepend(" ")
    learner.pre_tokenizer = splitter
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    learner.train_from_iterator(_corpus(seed), trainer)
    learned = json.loads(learner.to_str())["model"]
    words = _whole_words(seed)

    # The most useful of the learned merges, as many as leave room for the whole words.
    vocab = {token: i for token, i in learned["vocab"].items() if i < len(SPECIAL_TOKENS) + 256}
    merges: list[tuple[str, str]] = []
    for left, right in learned["merges"]:
        missing = sum(word not in vocab for word in words)
        if len(vocab) + missing >= VOCAB_SIZE:
            break
        merges.append((left, right))
        vocab.setdefault(left + right, len(vocab))
    for word in words:
        vocab.setdefault(word, len(vocab))

    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.normalizer = Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path, model_max_length: int) -> None:
    """Writes `tokenizer.json`, and `tokenizer_config.json` with the chat template."""
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _corpus(seed: int) -> Iterator[str]:
    for i in range(300):
        document = make_document(seed * 1000 + i, 60, "train")
        yield document.text
        yield from (question.text for question in ask(document, i, 60))


def _whole_words(seed: int) -> list[str]:
    """All pieces that should be one token, spelt in the byte-level alphabet (Ġ is a space)."""
    numbers = [f"{n:02d}" for n in range(100)]
    inside = [word for name, words in vars(demo_words).items() if name.isupper() for word in words]
    counts: Counter[str] = Counter()
    for text in _corpus(seed):
        counts.update(re.findall(r" ?[A-Za-z]+", " " + text))
    common = [word.replace(" ", "Ġ") for word, count in counts.most_common() if count >= 20]
    spaced = ["Ġ" + word for word in inside]
    letters = ["Ġ" + letter for letter in "ABCDEFGH"]
    spaced += ["Ġ" + number for number in numbers]
    return list(dict.fromkeys([*numbers, *spaced, *letters, *common]))
