"""Every Triton kernel compiles for sm_90, without spills and with the instructions it is meant for.

A compilation takes seconds. Most tests are of a choice of variants: each kernel, type and feature
that brings in other code; the last one is of all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from coppice.kernels.triton.dependent import offered

# The compiler takes half a minute for a choice of variants.
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
COMPILED = (
    "prefill bf16 128",
    "prefill bf16 128 fp8 cache",
    "prefill bf16 80",
    "prefill bf16 80 fp8 cache",
    "decode bf16 128",
    "decode fp8 128 persistent",
    "decode bf16 128 fp8 cache",
    "decode fp32 64",
    "merge 80",
    "levels",
    "gather",
    "deliver",
    "rotate fp8e4nv normed",
    "norm e4m3",
    "choice count",
    "choice draw",
    "expert gate bf16 few",
)


def compile_all(names: Sequence[str], cache: Path) -> dict[str, dict]:
    """What the compiler made, in a process of its own: in this one Triton may be interpreting."""
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outside["TRITON_CACHE_DIR"] = str(cache)
    ran = subprocess.run(
        [sys.executable, SCRIPT, *names], env=outside, capture_output=True, text=True, timeout=1180
    )
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    return {row["name"]: row for row in rows}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict]:
    made = compile_all(COMPILED, tmp_path_factory.mktemp("triton"))
    assert set(made) == set(COMPILED)
    return made


def assert_fits(compiled: dict[str, dict]) -> None:
    for name, row in compiled.items():
        assert row["local"] == row["spills"] == 0, row
        assert row["unset"] == [], row
        # Triton 3.6's assembler puts 8 bytes aside for one variant, and keeps nothing there.
        assert row["stack"] <= 8, row
        assert row["registers"] < 255, row
        assert row["shared"] <= 227 * 1024, f"{name} asks for more than a multiprocessor has"


_MULTIPLIED = ("prefill", "decode", "deterministic", "product", "expert")


def assert_tensor_cores(compiled: dict[str, dict]) -> None:
    """Warp groups from 64 packed rows on, the smallest product below, none for exact float32."""
    for name, row in compiled.items():
        if "fp32" in name or name.split()[0] not in _MULTIPLIED:
            assert row["wgmma"] == row["mma"] == 0, row
        elif row["queries"] >= 64:
            assert row["wgmma"] > 0 and row["mma"] == 0, row
        else:
            assert row["mma"] > 0, row


def assert_launches_overlap(compiled: dict[str, dict]) -> None:
    """Where Triton offers it, kernels wait for the one before them themselves."""
    for name, row in compiled.items():
        apart = name in ("copy", "deliver")
        assert row["dependent"] == (offered() and not apart), row


def test_launches_overlap(compiled):
    assert_launches_overlap(compiled)


def test_nothing_spills(compiled):
    assert_fits(compiled)


def test_tensor_cores_multiply(compiled):
    assert_tensor_cores(compiled)


def assert_loads_overlap(compiled: dict[str, dict]) -> None:
    """Keys and values are loaded a tile ahead, while tiles are multiplied, in enough programs."""
    for name, row in compiled.items():
        kind = name.split()[0]
        if kind not in ("prefill", "decode", "deterministic") or "fp32" in name:
            continue
        assert row["buffers"] >= 2, row
        # Heads above 128 in tiles of many rows have two buffers, and no room for more.
        if name not in ("prefill bf16 192", "prefill bf16 256", "decode bf16 256 group 64"):
            assert row["wait"] >= 2, row
        assert row["resident"] >= row["planned"], row


def test_loads_overlap_products(compiled):
    assert_loads_overlap(compiled)


def test_instructions_of_a_tile(compiled):
    """What a program issues for 64 keys: 8-bit keys cost no more than those of 16 bits."""
    assert max(compiled["decode bf16 128"]["tiles"]) < 500
    assert max(compiled["decode bf16 128 fp8 cache"]["tiles"]) < 500
    whole, masked = compiled["prefill bf16 128"]["tiles"]
    assert whole < 450 and masked < 650


def test_a_head_of_80_is_not_multiplied_as_one_of_128(compiled):
    """Its shared memory is that of 64 + 16 elements a key, not of 128; 8-bit keys are padded."""
    assert compiled["prefill bf16 80"]["shared"] < 0.65 * compiled["prefill bf16 128"]["shared"]
    whole = compiled["prefill bf16 128 fp8 cache"]["shared"]
    assert compiled["prefill bf16 80 fp8 cache"]["shared"] == whole


@pytest.mark.timeout(1200)  # more than seventy compilations
def test_every_variant(tmp_path):
    made = compile_all((), tmp_path)
    assert len(made) > 50
    assert_fits(made)
    assert_tensor_cores(made)
    assert_loads_overlap(made)
    assert_launches_overlap(made)
