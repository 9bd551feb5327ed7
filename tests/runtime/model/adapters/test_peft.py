"""Adapters beside PEFT itself: what it writes is read, and what it computes is computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import load

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.slow
TOKENS = 8
INVOCATION = [301, 302]
KINDS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear"},
    "some": {"target_modules": ["q_proj", "up_proj"], "use_rslora": True, "lora_alpha": 5},
    "patterns": {
        "target_modules": r".*\.(v_proj|down_proj|gate_proj)",
        "rank_pattern": {"v_proj": 2, r"layers\.1\.mlp\.down_proj": 7},
        "alpha_pattern": {"mlp.gate_proj": 3},
    },
    "layers": {"target_modules": ["k_proj", "o_proj"], "layers_to_transform": [1]},
    "left out": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "invoked": {"target_modules": "all-linear", "alora_invocation_tokens": INVOCATION},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_pefts_merged_model(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    peft = pytest.importorskip("peft", reason="needs PEFT")
    path = tiny_checkpoint("llama")
    config = peft.LoraConfig(
        r=4, init_lora_weights=False, task_type="CAUSAL_LM", **({"lora_alpha": 8} | KINDS[kind])
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(load(path), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(tmp_path)
    rng = random.Random(4)
    prompt = [rng.randrange(3, 300) for _ in range(23)]
    if kind == "invoked":
        prompt += [*INVOCATION, 9, 8, *INVOCATION, 7]
    theirs = model if kind == "invoked" else model.merge_and_unload()
    ids = torch.tensor([prompt])
    made = theirs.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
        min_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    engine = Engine(
        EngineConfig(model=str(path), kv_cache_tokens=512, page_size=7, enable_lora=True)
    )
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for _ in range(2):  # cold, and warm
        asked = LoRARequest("theirs", 1, str(tmp_path))
        engine.add_request("a", prompt, params, lora_request=asked)
        ours: list[int] = []
        while engine.has_unfinished():
            ours += [token for out in engine.step() for token in out.new_token_ids]
        assert ours == made[0, len(prompt) :].tolist()
