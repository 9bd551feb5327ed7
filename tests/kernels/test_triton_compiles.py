"""Every Triton kernel compiles for sm_90, without spills and with the instructions it is meant for.

A compilation takes seconds, so the variants are a choice: each kernel, type and feature that brings
in other code. ``python tests/kernels/compile_for_hopper.py`` compiles them all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
COMPILED = (
    "prefill bf16 128",
    "decode bf16 128 window softcap",
    "decode bf16 128 fp8 cache",
    "decode fp32 64",
    "merge 80",
    "write fp8e4nv",
    "rotate bf16",
    "copy",
    "norm",
    "silu",
    "quantize",
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict]:
    """What the compiler made, in a process of its own: in this one Triton may be interpreting."""
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outside["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    ran = subprocess.run(
        [sys.executable, SCRIPT, *COMPILED],
        env=outside,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    return {row["name"]: row for row in rows}


def test_nothing_spills(compiled):
    assert set(compiled) == set(COMPILED)
    for name, row in compiled.items():
        assert row["stack"] == row["local"] == row["spills"] == 0, row
        assert row["registers"] < 255, row
        assert row["shared"] <= 227 * 1024, f"{name} asks for more than a multiprocessor has"


def test_tensor_cores_multiply(compiled):
    """Warp groups in prefill, the smallest product in decode, none for exact float32."""
    for name, row in compiled.items():
        if name.startswith("prefill"):
            assert row["wgmma"] > 0 and row["mma"] == 0, row
        elif name.startswith("decode bf16"):
            assert row["mma"] > 0, row
        else:
            assert row["wgmma"] == row["mma"] == 0, row
