"""Norms over all heads of a token, where each rank has some of them."""

from __future__ import annotations

import torch

from coppice.runtime.model.parallel.division import Share
from coppice.runtime.model.parallel.group import RankGroup


def norm_all_heads(
    queries: torch.Tensor,
    keys: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    share: Share,
    group: RankGroup,
) -> torch.Tensor:
    """RMSNorm of a token's queries together, and of its keys; reduced in float32.

    ``queries [T, own heads * dim]`` and ``keys`` are this rank's, and so are the ``weights`` of
    both. Returns them side by side.
    """
    wide = queries.float(), keys.float()
    sums = torch.stack([each.square().sum(-1) for each in wide], -1)
    if not share.first_of_kv:
        sums[:, 1] = 0  # another rank adds the same keys
    group.sum(sums)
    made = []
    whole = share.whole
    for index, heads in enumerate((whole.num_heads, whole.num_kv_heads)):
        mean = sums[:, index : index + 1] / (heads * whole.head_dim)
        normed = wide[index] * torch.rsqrt(mean + eps) * weights[index].float()
        made.append(normed.to(queries.dtype))
    return torch.cat(made, 1)
