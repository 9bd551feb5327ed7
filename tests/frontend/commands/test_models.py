"""`coppice models`: what is listed is what the code has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from coppice.frontend.commands.main import main
from coppice.runtime.model.families.registry import FAMILIES
from coppice.runtime.model.files import formats
from coppice.runtime.model.files.formats import FORMATS, GGUF_FAMILIES, STORED
from coppice.runtime.model.files.opening import open_tensors
from coppice.runtime.model.files.quantized.method import method_of


def test_every_family_is_listed_with_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    found = {each["model_type"]: each for each in listed["families"]}
    assert list(found) == list(FAMILIES)
    assert found["gpt_oss"] == {
        "model_type": "gpt_oss", "architecture": "GptOssForCausalLM", "one_call": True,
        "int8": True, "fp8": False, "gguf": False, "adapters": "attention", "experts": True,
        "windows": True, "soft_cap": False, "sinks": True, "stored": ["mxfp4"],
    }  # fmt: skip
    assert found["gemma2"]["soft_cap"] and found["gemma2"]["fp8"] and found["gemma2"]["gguf"]
    assert found["gemma2"]["adapters"] == "all"
    assert {each for each in found if found[each]["gguf"]} == set(GGUF_FAMILIES)
    assert set(STORED) == set(listed["quantized_checkpoints"]) - {"mxfp4"}
    assert listed["weights"] == {name: list(files) for name, files in FORMATS.items()}
    assert listed["quantization"] == ["int8", "int4", "fp8"]
    assert {"Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q4_1", "F16", "BF16"} < set(
        listed["gguf"]["types"]
    )


def test_what_is_listed_of_gguf_and_quantised_checkpoints_is_read() -> None:
    numbers = np.zeros((1, 256), np.float32)
    for name in formats.GGUF_TYPES:
        kind = gguf.GGMLQuantizationType[name]
        count, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.zeros((1, 256 // count * size), np.uint8)
        plain = {"F32": np.float32, "F16": np.float16}.get(name)
        decoded = gguf.dequantize(blocks.view(plain) if plain else blocks, kind)
        assert decoded.shape == numbers.shape, name
    for method, stored in formats.QUANTIZED.items():
        found = method_of({"quant_method": method, "format": "pack-quantized"}, Path("config.json"))
        assert (found is None) == (stored == "gpt-oss"), "the family decodes it itself"


def test_the_table_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[1 : lines.index("")]
    assert [row.split()[0] for row in rows] == list(FAMILIES)
    assert not any("…" in row for row in rows)
    assert any("Mamba" in line for line in lines)


def test_it_starts_without_torch() -> None:
    script = (
        "import sys; from coppice.frontend.commands.main import main; "
        "main(['models']); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-P", "-c", script], check=False, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()


def test_every_file_that_is_listed_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds none of") as missing:
        open_tensors(tmp_path)
    for number, file in enumerate(file for files in FORMATS.values() for file in files):
        assert (file.removesuffix(".index.json") if number < 4 else "GGUF") in str(missing.value)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / file.replace("*", "model")).write_text("")
        with pytest.raises(ValueError, match=str(folder)) as broken:
            open_tensors(folder)
        assert "holds none of" not in str(broken.value)
