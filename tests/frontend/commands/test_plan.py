"""`coppice plan` as people run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coppice.frontend.commands.machine.planned.units import size
from coppice.frontend.commands.main import main

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_the_formats_of_a_cpu_have_the_measured_costs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the first row of each format, and weights by arithmetic."""
    assert main(["plan", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cpu_formats"]
    rows = Path(__file__).parents[3] / "benchmarks" / "results" / "quality-cpu.jsonl"
    measured: dict[str, dict[str, Any]] = {}
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        if row["model"] == found["costs_seen_on"]:
            measured.setdefault(row["mode"], row)
    by_name = {each["name"]: each for each in found["formats"]}
    assert list(by_name) == ["float32", "bfloat16", "int8", "int4"]
    assert by_name["float32"]["weight_bytes"] == by_name["bfloat16"]["weight_bytes"]
    assert by_name["bfloat16"]["weight_bytes"] == 16_060_522_496
    assert 0.5 < by_name["int8"]["weight_bytes"] / 16_060_522_496 < 0.6
    assert by_name["int4"]["weight_bytes"] < 0.8 * by_name["int8"]["weight_bytes"]
    for name in ("bfloat16", "int8", "int4"):
        assert by_name[name]["perplexity_more"] == measured[name]["perplexity_more"]
        for work in ("prefill", "decode_1", "decode_16"):
            assert by_name[name][work] == measured[name]["speed"][work]["median"]
    assert main(["plan", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "--dtype bfloat16" in shown
    assert "other models lose more in int4" in shown


def test_a_folder_and_its_config_give_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for model in (folder, folder / "config.json"):
        words = [
            "--device-memory",
            "80GiB",
            "--shared",
            "4096",
            "--memory-bandwidth",
            "3.35TB/s",
            "--json",
        ]
        assert main(["plan", str(model), *words]) == 0
        found.append(json.loads(capsys.readouterr().out) | {"model": ""})
    assert found[0] == found[1]
    plan = found[0]
    assert plan["parameters"] == 8_030_261_248
    assert plan["weight_bytes"] == 16_060_522_496
    assert (plan["kv_bytes_a_token"], plan["page_bytes"]) == (131_072, 2_097_152)
    assert plan["pages"] == int((80 * 2**30 - 16_060_522_496) * 0.9) // 2_097_152
    assert plan["paged"]["fit"] == plan["pages"] // 512
    assert plan["paged_shared"]["fit"] == (plan["pages"] - 256) // 256
    assert plan["paged_shared"]["bytes"] == (256 + 64 * 256) * 2_097_152


def test_the_table(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    words = [
        "--kv-cache-memory",
        "60GB",
        "--max-model-len",
        "4096",
        "--context",
        "500",
        "--users",
        "1",
    ]
    assert main(["plan", str(folder), *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "KV of a page of 16 2 MiB 2,097,152 bytes" in shown
    assert "pages 28,610 457,760 tokens" in shown
    assert "4,096 tokens reserved for each 512 MiB 111 87.8%" in shown
    assert "in pages 64 MiB 894 2.3%" in shown


def test_what_windows_leave_unread(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 layers 16 have a window of 100: of 1,000 tokens these do not read 900."""
    monkeypatch.setenv("COLUMNS", "200")
    config = CONFIG | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 100,
        "head_dim": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(folder), "--context", "1000"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "step reads 68.8 MiB of the 125 MiB of such a sequence; 28.1 pages' worth is" in shown
    assert main(["plan", str(folder), "--context", "1000", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["kv_bytes_read_a_step"] == (1000 * 32 - 900 * 16) * 4096
    assert plan["window_pages_kept"] == 900 * 16 / (16 * 32)


def test_options_of_other_servers_are_answered_with_ours(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--block-size", "32", "-pp", "1"]) == 0
    said = capsys.readouterr()
    assert "KV of a page of 32" in said.out
    assert "-pp: --tensor-parallel-size divides a model among devices" in said.err
    for words, answer in (
        (["--gpu-memory-utilization", "0.9"], "use --kv-cache-memory-fraction"),
        (["-pp", "2"], "must be 1 here, got '2': --tensor-parallel-size divides a model"),
    ):
        with pytest.raises(SystemExit):
            main(["plan", str(folder), *words])
        assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["/no/such"], "model is '/no/such'; there is no such folder or config.json"),
        (["demo", "--context", "100000000"], "context must be at most max_model_len"),
    ],
)
def test_what_is_refused(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert error in capsys.readouterr().err


def test_a_draft_model_takes_memory_and_a_part_of_each_page(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path_factory.mktemp("small")
    changes = {"num_hidden_layers": 4, "hidden_size": 1024, "head_dim": 128}
    (small / "config.json").write_text(json.dumps({**CONFIG, **changes}))

    def planned(*words: str) -> dict[str, Any]:
        assert main(["plan", str(folder), "--device-memory", "80GiB", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    alone, both = planned(), planned("--draft-model", str(small))
    kv = alone["kv_bytes_a_token"]
    assert both["kv_bytes_a_token"] == kv
    assert both["draft_model_kv_bytes_a_token"] == 2 * 4 * 8 * 128 * 2 == kv // 8
    weights = both["draft_model_weight_bytes"]
    assert 2 * 2 * 128256 * 1024 < weights < 2 * 2 * 128256 * 1024 + 4 * 200_000_000
    assert both["kv_cache_bytes"] == pytest.approx(alone["kv_cache_bytes"] - 0.9 * weights, abs=2)
    assert both["pages"] == both["kv_cache_bytes"] // (16 * (kv + kv // 8))
    assert both["paged"]["bytes"] == alone["paged"]["bytes"] * 9 // 8
    assert (alone["draft_model_weight_bytes"], alone["draft_model_kv_bytes_a_token"]) == (0, 0)
    assert main(["plan", str(folder), "--draft-model", str(small)]) == 0
    assert "draft model's weights" in capsys.readouterr().out
    for words, error in (
        (["/no/such"], "draft_model '/no/such' cannot be used: model is '/no/such'"),
        ([str(small), "--tensor-parallel-size", "2"], "draft_model must be left out with"),
    ):
        assert main(["plan", str(folder), "--draft-model", *words]) == 2
        assert error in capsys.readouterr().err


def test_sizes() -> None:
    assert size("80GiB") == 80 * 2**30
    assert size("60GB") == size("60 g") == 60 * 10**9
    assert size("3.35TB/s") == 3_350_000_000_000
    assert size("123") == 123
    for wrong in ("", "much", "-1", "1iB", "8 bits"):
        with pytest.raises(Exception, match="must be a number of bytes such as 80GiB"):
            size(wrong)


def test_what_files_hold_and_what_memory_takes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * 1234)
    whole = 16_060_522_496
    for described, name, fewer_bits in (
        ({"quant_method": "awq", "bits": 4}, "AWQ, 4 bits", True),
        ({"quant_method": "gptq", "bits": 8}, "GPTQ, 8 bits", False),
        ({"quant_method": "fp8"}, "FP8", True),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized"},
            "compressed-tensors, 8 bits",
            True,
        ),
    ):
        changed = CONFIG | {"quantization_config": described}
        (folder / "config.json").write_text(json.dumps(changed))
        assert main(["plan", str(folder), "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert (plan["stored_as"], plan["stored_bytes"]) == (name, 1234)
        assert plan["weight_bytes"] == whole, "in 16 bits"
        assert (plan["weight_bytes_on_cpu"] < 0.6 * whole) == fewer_bits
    assert main(["plan", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "weights in files 1.2 KiB compressed-tensors, 8 bits, decoded while it is" in shown
    assert "weights in memory 15.0 GiB bfloat16 on a CPU 8.0 GiB int8" in shown
    (folder / "model.safetensors").unlink()
    assert main(["plan", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stored_bytes"] is None


def test_no_torch_is_imported(folder: Path) -> None:
    script = (
        "import sys; from coppice.frontend.commands.main import main; "
        f"main(['plan', {str(folder)!r}]); "
        "sys.exit(bool({'torch', 'transformers', 'aiohttp'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", script], check=False, capture_output=True)
    assert ran.returncode == 0


def test_a_model_of_transformers_is_not_called_unsupported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = CONFIG | {"model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(changed))
    assert main(["plan", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "model_type is 'starcoder2'; plans are made for the families" in error
    assert "through transformers" in error and "supported" not in error
