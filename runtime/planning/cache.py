"""Arithmetic of the KV cache: bytes, pages, sequences that fit, waste, and what windows would save.

Bytes of a page and waste by reservation are those of Kwon et al. 2023 (PagedAttention).
"""

from __future__ import annotations

from collections.abc import Sequence

from coppice.runtime.model.config import ModelConfig


def token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of keys and values of a token in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * itemsize


def model_token_bytes(model: ModelConfig, itemsize: int) -> int:
    """The same of a model."""
    return token_bytes(model.num_layers, model.num_kv_heads, model.head_dim, itemsize)


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold these tokens."""
    return -(-tokens // page_size)


def reserved_waste(reserved: int, used: int) -> float:
    """The share of the memory that is wasted where ``reserved`` tokens are kept for ``used``."""
    return 1 - used / reserved


def pages_each(context: int, shared: int, page_size: int) -> tuple[int, int]:
    """Pages that all sequences of ``context`` tokens share, and those that each has for itself.

    They begin with the same ``shared`` tokens. The page in which these end is copied for each.
    """
    common = min(shared, context - 1) // page_size
    return common, pages_of(context, page_size) - common


def sequences_that_fit(pages: int, common: int, own: int) -> int:
    """Sequences that fit in so many pages, of which ``common`` are shared by all."""
    return max(0, pages - common) // own


def window_tokens(windows: Sequence[int | None], tokens: int) -> int:
    """Tokens of all layers together that are older than their layer's window, at ``tokens``."""
    return sum(max(0, tokens - window) for window in windows if window is not None)


def window_saving(windows: Sequence[int | None], tokens: int) -> str:
    """What freeing keys older than their window would save, in a sentence; "" without windows."""
    counted = [window for window in windows if window is not None]
    if not counted:
        return ""
    share = window_tokens(windows, tokens) / (tokens * len(windows))
    sizes = " and ".join(f"{size:,}" for size in sorted(set(counted)))
    return (
        f"{len(counted)} of {len(windows)} layers attend to the last {sizes} tokens alone; freeing "
        f"older keys would save {share:.1%} of the KV of a sequence of {tokens:,} tokens, but they "
        f"are kept, since prompts that begin alike hit them"
    )
