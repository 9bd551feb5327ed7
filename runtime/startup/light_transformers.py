"""Loads transformers' tokenizers without its models, and where torch is not wanted without torch.

transformers decides what it imports by asking its own `is_torch_available`. Both functions here
replace that answer, one for a single import, the other for good. Processor time to load the demo
model's tokenizer and fill its chat template, and memory, with transformers 5.23 and torch 2.13 on
a CPU (import of torch alone: 3.1 s, 225 MB):

    as it is                         9.7 s   415 MB
    `load_tokenizer`                 4.4 s   258 MB
    the same, `leave_out_torch`      1.7 s    78 MB

Where a version of transformers has no such function, both do nothing, and it imports as usual.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers' AutoTokenizer makes of a directory, and its errors."""
    _leave_out_models()
    from transformers import AutoTokenizer

    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    return loaded


def leave_out_torch() -> None:
    """Makes transformers regard torch as missing for the rest of this process.

    Call it first, in a process of our own that computes nothing: it cannot load transformers'
    models any more. Without effect if torch is loaded already.
    """
    if "torch" in sys.modules:
        return
    import transformers.utils
    from transformers.utils import import_utils

    for module in (transformers.utils, import_utils):
        if hasattr(module, "is_torch_available"):
            module.is_torch_available = _no


def _leave_out_models() -> None:
    """Imports the checks of configs without the models that they import beside torch.

    Configs check the name of an activation against a table that lies among the models, and with
    those come torch's compiler and its distributed tensors. Where torch is missing transformers
    leaves that check out, so torch looks missing while that one module is imported.
    """
    from transformers.utils import import_utils

    if "transformers.utils.type_validators" in sys.modules:
        return
    known = getattr(import_utils, "is_torch_available", None)
    if known is None:
        return
    import_utils.is_torch_available = _no
    try:
        from transformers.utils import type_validators
    except ImportError:
        return
    finally:
        import_utils.is_torch_available = known
    # As the module would have them.
    type_validators.is_torch_available = known
    if known():
        import torch

        type_validators.torch = torch


def _no() -> bool:
    return False
