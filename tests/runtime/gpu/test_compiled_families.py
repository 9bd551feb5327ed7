"""Attention as each family's published models ask for it compiles for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coppice.runtime.model.families.registry import FAMILIES

SCRIPT = Path(__file__).parents[2] / "kernels" / "triton" / "compile_for_hopper.py"


def asked(family: str) -> list[str]:
    """The shapes of attention in the layers of a family, as the script calls them."""
    config = FAMILIES[family].read({"model_type": family}, eos_token_ids=())
    shape = f"model {config.head_dim} group {config.num_heads // config.num_kv_heads}"
    cap = " softcap" * (config.attention_softcap is not None)
    windowed = {window is not None for window in config.sliding_windows}
    return [shape + " window" * each + cap for each in sorted(windowed)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What the compiler made of all shapes, each once."""
    names = dict.fromkeys(name for family in FAMILIES for name in asked(family))
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outside["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    ran = subprocess.run(
        [sys.executable, SCRIPT, *names], env=outside, capture_output=True, text=True, timeout=290
    )
    assert ran.returncode == 0, ran.stderr
    return {row["name"]: row for row in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.model("sm_90")
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_compiles_and_spills_nothing(
    compiled: dict[str, dict[str, int]], family: str
) -> None:
    for name in asked(family):
        for kind in ("prefill", "decode"):
            row = compiled[f"{kind} bf16 {name}"]
            assert row["local"] == row["spills"] == 0, row
            assert row["registers"] < 255 and row["shared"] <= 227 * 1024, row
            assert row["wgmma"] + row["mma"] > 0, row
