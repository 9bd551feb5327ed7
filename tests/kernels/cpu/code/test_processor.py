"""The table of paths: what a processor takes, and what the environment may force."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coppice.kernels.cpu.code import processor

VARIABLE = "COPPICE_CPU_PATHS"


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        (
            {"avx512f", "avx512vnni", "avx512bf16", "fma", "f16c"},
            ("fma", "avx512bf16", "avx512vnni", "avx512vnni"),
        ),
        (
            {"avx512f", "avx512vnni", "avx512bf16", "fma", "f16c", "amx-tile", "amx-bf16"},
            ("fma", "amx", "avx512vnni", "avx512vnni"),
        ),
        (
            {"avx512f", "avx512vnni", "fma", "f16c", "amx-tile", "amx-int8"},
            ("fma", "torch", "amx", "avx512vnni"),
        ),
        ({"avx2", "avxvnni", "fma", "f16c"}, ("fma", "torch", "avxvnni", "avxvnni")),
        ({"avx2", "fma"}, ("torch", "torch", "avx2", "torch")),
        ({"avx512f", "avx2", "fma", "f16c"}, ("fma", "torch", "avx2", "avx2")),
        ({"neon", "bf16", "dotprod"}, ("torch", "torch", "torch", "torch")),
        (set(), ("torch", "torch", "torch", "torch")),
    ],
)
def test_each_processor_takes_the_best_path_that_it_has(monkeypatch, has, expected):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(processor, "features", lambda: frozenset(has))
    kinds = ("float", "bfloat16", "int8", "int4")
    assert tuple(processor.path_of(kind) for kind in kinds) == expected


@pytest.mark.parametrize("granted", [True, False])
def test_tiles_are_there_where_the_system_grants_them(monkeypatch, granted):
    has = dict.fromkeys(("avx512f", "avx512vnni", "amx-tile", "amx-int8", "amx-bf16"), True)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: has)
    monkeypatch.setattr(processor, "_granted_tiles", lambda: granted)
    found = processor.features.__wrapped__()
    assert ("amx-int8" in found, "amx-tile" in found) == (granted, granted)
    assert {"avx512f", "avx512vnni"} <= found


def test_linux_tells_what_an_arm_processor_has():
    """LLVM leaves out products of bfloat16 there."""
    graviton = "processor\t: 0\nFeatures\t: fp asimd crc32 asimddp sve i8mm bf16\nCPU part\t: 0xd40"
    assert processor.arm_features(graviton) == {"neon", "dotprod", "bf16"}
    assert processor.arm_features("Features\t: fp asimd") == {"neon"}
    assert processor.arm_features("") == set()


@pytest.mark.parametrize(("has", "expected"), [({"znver4"}, "read"), (set(), "fetched")])
def test_weights_are_fetched_ahead_where_the_processor_does_not(monkeypatch, has, expected):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(processor, "features", lambda: frozenset(has))
    assert processor.path_of("memory") == expected


def test_a_forced_path_is_taken_or_refused_by_name(monkeypatch):
    monkeypatch.setattr(processor, "features", lambda: frozenset({"avx512vnni"}))
    monkeypatch.setenv(VARIABLE, "int8=torch")
    assert processor.path_of("int8") == "torch"
    with pytest.raises(ImportError, match="int8=torch"):
        processor.compiled_path("int8")
    monkeypatch.setenv(VARIABLE, "int8=avxvnni")
    with pytest.raises(ValueError, match="int8=avxvnni; this processor has no avxvnni"):
        processor.path_of("int8")
    for wrong in ("int8=sse", "int3=torch", "torch"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{wrong}.*float=fma"):
            processor.path_of("int8")


def test_forced_products_of_torch_are_what_runs():
    """In a process of its own: products are chosen once."""
    code = (
        "import torch\n"
        "from coppice.kernels.cpu.layer.matmul import float_products, int8_products\n"
        "assert float_products.float_kernels() is None and int8_products.panel_kernels() is None\n"
        "assert float_products.pack(torch.ones(4, 4)) is None\n"
        "assert float_products.pack(torch.ones(4, 4).bfloat16(), pairs=True) is None\n"
    )
    forced = {"PATH": "", VARIABLE: "float=torch,int8=torch"}
    subprocess.run([sys.executable, "-c", code], check=True, env=forced)
