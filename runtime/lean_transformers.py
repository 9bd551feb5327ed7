"""Keeps transformers' models out of a process that wants its configs and tokenizers only."""

from __future__ import annotations

import sys
from functools import cache


@cache
def leave_out_models() -> None:
    """Call before a config or tokenizer is loaded.

    Configs check the name of an activation against a table that lies among transformers' models,
    and with those come torch's compiler and its distributed tensors: 2.5 to 5 s of the start of
    every process, on a machine where torch takes 2 to 3. Where torch is missing transformers leaves
    the check out; so it is told that, for that one import. ``load_model_config`` checks the name.
    Without effect if the models are there already.
    """
    import torch
    from transformers.utils import import_utils

    name = "transformers.utils.type_validators"
    if name in sys.modules:
        return
    known = import_utils.is_torch_available
    import_utils.is_torch_available = lambda: False
    try:
        from transformers.utils import type_validators
    except ImportError:  # another version of transformers, which may do without the table
        return
    finally:
        import_utils.is_torch_available = known
    # As the module would have them.
    type_validators.is_torch_available = known
    type_validators.torch = torch
