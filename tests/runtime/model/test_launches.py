"""How many kernels a decoder layer launches on a GPU: counted, not run, without one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coppice.kernels.attention.interface import AttentionPlan, LayerCache
from coppice.kernels.backends import select_backend
from coppice.kernels.triton import backend as triton_backend
from coppice.kernels.triton import rows as triton_rows
from coppice.kernels.triton.base import INTERPRETED
from coppice.runtime.model import layers
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.layers import Linear
from coppice.runtime.model.linear import eight_bit

if not INTERPRETED:
    pytest.skip("launches are counted where Triton interprets its kernels", allow_module_level=True)

from triton.runtime.interpreter import GridExecutor

# What launches nothing: new tensors, and other views of the same numbers.
NO_KERNELS = {"empty", "empty_strided", "view", "_unsafe_view", "slice", "select", "t", "transpose"}
NO_KERNELS |= {"unsqueeze", "detach", "alias", "as_strided", "expand", "split", "unbind", "permute"}

IN_16_BITS = (
    "norm_rows linear rotate_rows attend_items linear norm_rows linear silu_mul_rows linear"
)
IN_8_BITS = (
    "norm_rows _scaled_mm rotate_rows attend_items quantize_rows _scaled_mm norm_rows _scaled_mm "
    "silu_mul_levels _scaled_mm"
)


class Launches(TorchDispatchMode):
    """Counts torch's operations and Triton's kernels by name; the latter do nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        launches = self.counts

        def counted(executor: Any, *arguments: Any, **options: Any) -> None:
            launches[executor.fn.__name__] += 1

        monkeypatch.setattr(GridExecutor, "__call__", counted)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function.name().removeprefix("aten::").partition(".")[0]
        made = function(*arguments, **(options or {}))
        if name not in NO_KERNELS and made is not arguments[0]:
            self.counts[name] += 1
        return made


@pytest.mark.parametrize(
    ("family", "linear", "expected"),
    [
        (
            "llama",
            Linear,
            IN_16_BITS,
        ),
        (
            "qwen3",
            Linear,
            IN_16_BITS,
        ),
        (
            "llama",
            eight_bit.Fp8Linear,
            IN_8_BITS,
        ),
        (
            "qwen2",  # with a bias
            eight_bit.Fp8Linear,
            IN_8_BITS,
        ),
    ],
)
def test_launches_of_a_layer(tiny_checkpoint, monkeypatch, family, linear, expected):
    monkeypatch.setattr(layers, "gpu_rows", lambda device: triton_rows)
    monkeypatch.setattr(eight_bit, "gpu_rows", lambda device: triton_rows)
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)  # its results have their own type
    config = load_model_config(tiny_checkpoint(family))
    found = []
    device = torch.device("cpu")
    for count in (1, 2):
        few = replace(config, layers=config.layers[:1] * count)
        decoder = Decoder(few, linear=linear, dtype=torch.bfloat16, device=device)
        backend = select_backend("triton", device)
        shape = (8, 16, config.num_kv_heads, config.head_dim)
        kv = [LayerCache(*torch.empty(2, *shape, dtype=torch.bfloat16)) for _ in range(count)]
        plan = AttentionPlan(
            query_start=np.arange(4, dtype=np.int32),
            context_len=np.full(3, 5, np.int32),
            page_indptr=np.arange(4, dtype=np.int32),
            page_indices=np.arange(3, dtype=np.int32),
            page_size=16,
        )
        prepared = backend.prepare(plan)
        ids = torch.arange(3)
        with torch.inference_mode(), Launches(monkeypatch) as launches:
            decoder.hidden_states(ids, ids, ids, kv, backend, prepared, None)
        found.append(launches.counts)
    assert found[1] - found[0] == Counter(expected.split())
