"""Tiny checkpoints of every supported family, made with transformers, for all tests of runtime.

They have 2 layers, 4 query heads, 2 KV heads of dimension 16, hidden size 64, a vocabulary of 320
and 512 positions. Weights are drawn wide (deviation 0.3; norm weights and biases vary too), so that
greedy tokens differ from prompt to prompt and the best two logits are rarely close: results can be
compared token by token. Nothing in them ends a sequence by itself: the end-of-sequence id is 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models_table
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

#: Those that every test of all families takes; they differ in what engine and kernels see of them.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: These differ in their layers alone.
OTHER_FAMILIES = (
    "ministral", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "granite", "smollm3", "glm4",
    "mixtral", "qwen3_moe", "gpt_oss",
)  # fmt: skip
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "dtype": "float32",
}
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "ministral": {
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 11,
    },
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 11,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {},
    "olmo2": {},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {"head_dim": 16},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16},
    "gpt_oss": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "head_dim": 16,
    },
}


def make_model(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """transformers' model of a family, with random weights and ``changes`` to its config."""
    config = AutoConfig.for_model(family, **(SHAPE | _EXTRA[family] | changes))
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = name.endswith("norm.weight")
            parameter.normal_(1.0 if norm else 0.0, 0.3, generator=generator)
    return model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models-table", metavar="FILE", help="write the tables of models to FILE")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    report: Any = yield
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    for mark in item.iter_markers("model"):
        report.user_properties.append(("model", (parameters["family"], *mark.args)))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Writes the tables if they were asked for: a feature counts if no test of it failed."""
    file = config.getoption("--models-table", None)
    if file is None:
        return
    passed, others = defaultdict(set), defaultdict(set)
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            for name, (family, *features) in getattr(report, "user_properties", ()):
                if name == "model" and (report.when == "call" or outcome != "passed"):
                    where = passed if outcome in ("passed", "") else others
                    where[family].update(features)
    models_table.write(Path(file), {key: found - others[key] for key, found in passed.items()})


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_checkpoint(family, **changes_to_config)`` is a folder with that checkpoint.

    Families are ``FAMILIES``. Each is written once a session; do not change the folder. Load the
    same weights into transformers with ``AutoModelForCausalLM.from_pretrained(folder)``.
    """
    made: dict[str, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = f"{family} {sorted(changes.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            make_model(family, **changes).save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each supported family in turn."""
    return str(request.param)


@pytest.fixture
def scaled_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's product of 8-bit floats with a scale a row, emulated on a CPU where it lacks that."""
    theirs = torch._scaled_mm
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1), torch.ones(1, 16)
    try:
        theirs(ones[0], ones[0].t(), scale_a=ones[1], scale_b=ones[2], out_dtype=torch.bfloat16)
    except RuntimeError:

        def product(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
            if a.device.type != "cpu":
                return theirs(a, b, **options)
            scales = options["scale_a"] * options["scale_b"]
            return ((a.float() @ b.float()) * scales).to(options["out_dtype"])

        monkeypatch.setattr(torch, "_scaled_mm", product)
