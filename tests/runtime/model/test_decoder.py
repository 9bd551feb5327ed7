"""Logits against transformers' own models, through pages: whole, in chunks, token by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from coppice.kernels.attention.interface import AttentionPlan, LayerCache
from coppice.kernels.backends import select_backend
from coppice.kernels.cpu.code import threads
from coppice.kernels.cpu.layer.matmul.float_products import float_kernels
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.weights import load_decoder
from coppice.runtime.runner.compiled_layers import LayerStack, compile_layers
from tests.runtime.conftest import OTHER_FAMILIES

CPU = torch.device("cpu")
TOLERANCE = 1.5e-4
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 32}),
    ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 0.1}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    ("mistral", {}),
    ("mistral", {"tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 11}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
]
VARIANTS += [
    ("ministral", {}),
    ("gemma2", {}),
    ("gemma2", {"attn_logit_softcapping": None, "attention_bias": True}),
    ("gemma3_text", {}),
    ("gemma3_text", {"final_logit_softcapping": 10.0, "tie_word_embeddings": False}),
    ("phi3", {}),
    ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 11}),
    ("olmo2", {}),
    ("olmo2", {"attention_bias": True}),
    ("olmo3", {}),
    ("granite", {}),
    ("smollm3", {}),
    ("mixtral", {}),
    ("gpt_oss", {}),
    ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": True}),
    ("qwen3_moe", {"attention_bias": True}),
    ("glm4", {}),
    ("glm4", {"attention_bias": False, "tie_word_embeddings": True}),
    (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
                "long_factor": [2.0, 2.1, 2.2, 2.3, 2.5, 4.0],
                "partial_rotary_factor": 0.75,
            },
        },
    ),
]
IDS = [f"{family}-{'-'.join(changes) or 'plain'}" for family, changes in VARIANTS]

TRITON = pytest.param(
    "triton",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only without a GPU"),
)


COMPILED = pytest.param(
    "compiled",
    marks=pytest.mark.skipif(float_kernels() is None, reason="no compiled products of panels"),
)


# Interpreted, attention takes seconds, and is the same for every family.
MIXED = [
    pytest.param(
        family,
        backend.values[0],
        marks=[
            *backend.marks,
            *[pytest.mark.model("triton")][: backend is TRITON],
            *[pytest.mark.slow][: backend is TRITON and family != "qwen3"],
        ],
    )
    for backend in (pytest.param("reference"), pytest.param("cpu"), COMPILED, TRITON)
    for family in ("llama", "mistral", "qwen2", "qwen3")
]


class Run:
    """A few sequences that a decoder extends step by step, in pages dealt out in random order."""

    def __init__(self, decoder: Decoder, backend: str, sequences: int, page_size: int) -> None:
        config = decoder.config
        self.decoder = decoder
        self.backend = select_backend("cpu" if backend == "compiled" else backend, CPU)
        decoder.compiled = None
        if backend == "compiled":  # all layers in one call
            if decoder.layers[0].qkv.packed is None:
                decoder.pack()
            decoder.compiled = compile_layers(decoder, self.backend)
            assert decoder.compiled is not None
        self.page_size = page_size
        pages = -(-64 // page_size)
        self.num_pages = pages * sequences
        order = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32)
        self.tables = order.reshape(sequences, pages)
        self.lengths = [0] * sequences
        shape = (self.num_pages, page_size, config.num_kv_heads, config.head_dim)
        # An entry that is read though it was never written spoils the result.
        self.kv = [
            LayerCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
            for _ in range(config.num_layers)
        ]

    def step(
        self, batch: list[tuple[int, torch.Tensor]], rows: list[int] | None = None
    ) -> torch.Tensor:
        """Extend each (sequence, tokens) of the batch; logits of ``rows``, or of all."""
        positions = [
            torch.arange(self.lengths[s], self.lengths[s] + len(tokens)) for s, tokens in batch
        ]
        slots = [
            torch.from_numpy(self.tables[s].astype(np.int64))[at // self.page_size] * self.page_size
            + at % self.page_size
            for (s, _), at in zip(batch, positions, strict=True)
        ]
        for s, tokens in batch:
            self.lengths[s] += len(tokens)
        counts = [len(tokens) for _, tokens in batch]
        tables = [self.tables[s] for s, _ in batch]
        plan = AttentionPlan(
            page_size=self.page_size,
            query_start=np.cumsum([0, *counts], dtype=np.int32),
            context_len=np.array([self.lengths[s] for s, _ in batch], dtype=np.int32),
            page_indptr=np.cumsum([0, *map(len, tables)], dtype=np.int32),
            page_indices=np.concatenate(tables),
        )
        prepared = self.backend.prepare(plan, num_pages=self.num_pages)
        with torch.inference_mode():
            return self.decoder(
                torch.cat([tokens for _, tokens in batch]),
                torch.cat(positions),
                torch.cat(slots),
                self.kv,
                self.backend,
                prepared,
                torch.arange(sum(counts)) if rows is None else torch.tensor(rows, dtype=torch.long),
            )


@pytest.fixture
def models(tiny_checkpoint: Callable[..., Path]) -> Callable[..., tuple[Decoder, Any]]:
    """Our decoder and transformers' model over the same tiny checkpoint."""

    def load(family: str, changes: dict[str, Any]) -> tuple[Decoder, Any]:
        folder = tiny_checkpoint(family, **changes)
        decoder = load_decoder(folder, load_model_config(folder), dtype=torch.float32, device=CPU)
        reference = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        return decoder, reference.eval()

    return load


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed))


def expected_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(tokens[None]).logits[0].float()


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.model("logits")
@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("cpu", marks=pytest.mark.slow), COMPILED]
)
@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=IDS)
def test_agrees_with_transformers(
    models: Callable[..., tuple[Decoder, Any]], family: str, changes: dict[str, Any], backend: str
) -> None:
    """A whole prompt at once, the same in chunks, and the same token by token."""
    decoder, reference = models(family, changes)
    tokens = prompt(41)
    theirs = expected_logits(reference, tokens)

    assert_near(Run(decoder, backend, 1, 16).step([(0, tokens)]), theirs)
    chunked = Run(decoder, backend, 1, 4)
    assert_near(
        torch.cat([chunked.step([(0, part)]) for part in tokens.split([7, 1, 13, 20])]), theirs
    )
    stepwise = Run(decoder, backend, 1, 1)
    assert_near(torch.cat([stepwise.step([(0, token)]) for token in tokens.split(1)]), theirs)


@pytest.mark.parametrize(("family", "backend"), MIXED)
def test_a_mixed_batch_keeps_sequences_apart(
    models: Callable[..., tuple[Decoder, Any]], family: str, backend: str
) -> None:
    """Prefill, a chunk over cached tokens and decodes in one step."""
    decoder, reference = models(family, {})
    prompts = [prompt(n, seed) for seed, n in enumerate((23, 9, 30, 17))]
    run = Run(decoder, backend, 4, 4)
    run.step([(1, prompts[1][:8]), (3, prompts[3][:16]), (2, prompts[2][:11])])
    logits = run.step(
        [(0, prompts[0]), (3, prompts[3][16:]), (2, prompts[2][11:]), (1, prompts[1][8:])]
    )
    theirs = [expected_logits(reference, tokens) for tokens in prompts]
    assert_near(logits, torch.cat([theirs[0], theirs[3][16:], theirs[2][11:], theirs[1][8:]]))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only without a GPU")
@pytest.mark.model("triton")
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_what_differs_by_layer_is_computed_by_a_gpus_kernels_too(
    models: Callable[..., tuple[Decoder, Any]], family: str
) -> None:
    """Windows, soft-caps and sinks: a prompt, a chunk over cached tokens and a decode."""
    decoder, reference = models(family, {})
    tokens = prompt(29)
    run = Run(decoder, "triton", 1, 4)
    logits = torch.cat([run.step([(0, part)]) for part in tokens.split([24, 4, 1])])
    assert_near(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize("backend", [COMPILED])
def test_a_step_of_more_rows_than_pass_the_feed_forward_part_together(
    models: Callable[..., tuple[Decoder, Any]], family: str, backend: str
) -> None:
    """1,036 rows, which pass in three parts that are not equally long, and 17 in the last layer."""
    decoder, reference = models(family, {})
    prompts = [prompt(60 + seed % 3, seed) for seed in range(17)]
    together = sum(map(len, prompts))
    assert together > 1024 and together % 3
    ends = [sum(map(len, prompts[: at + 1])) - 1 for at in range(len(prompts))]
    theirs = torch.cat([expected_logits(reference, tokens) for tokens in prompts])
    assert_near(Run(decoder, backend, 17, 4).step(list(enumerate(prompts))), theirs)
    assert_near(Run(decoder, backend, 17, 4).step(list(enumerate(prompts)), ends), theirs[ends])


@pytest.mark.parametrize("backend", ["reference", COMPILED])
def test_logits_only_where_asked(
    models: Callable[..., tuple[Decoder, Any]], family: str, backend: str
) -> None:
    """Leaving rows out changes neither the others nor the KV that later steps read."""
    decoder, reference = models(family, {})
    tokens = prompt(20)
    theirs = expected_logits(reference, tokens)
    run = Run(decoder, backend, 1, 4)
    nothing = run.step([(0, tokens[:9])], rows=[])
    assert nothing.shape == (0, decoder.config.vocab_size)
    assert_near(run.step([(0, tokens[9:15])], rows=[5, 2]), theirs[[14, 11]])
    assert_near(run.step([(0, tokens[15:])], rows=[4]), theirs[19:])


@pytest.mark.skipif(float_kernels() is None, reason="no compiled products of panels")
def test_compiled_layers_refuse_a_slot_that_the_cache_lacks(
    models: Callable[..., tuple[Decoder, Any]],
) -> None:
    decoder, _ = models("llama", {})
    run = Run(decoder, "compiled", 1, 16)
    plan = run.backend.prepare(
        AttentionPlan(16, *(np.array(each, np.int32) for each in ([0, 1], [1], [0, 1], [0])))
    )
    place = torch.zeros(1, dtype=torch.long)
    with pytest.raises(IndexError, match=f"slots must be from 0 to {run.num_pages * 16 - 1}"):
        decoder(place, place, place + run.num_pages * 16, run.kv, run.backend, plan, place)


@pytest.mark.skipif(float_kernels() is None, reason="no compiled products of panels")
def test_compiled_layers_follow_a_list_of_caches_that_is_changed_in_place(
    models: Callable[..., tuple[Decoder, Any]],
) -> None:
    decoder, reference = models("llama", {})
    run, tokens = Run(decoder, "compiled", 1, 16), prompt(20)
    run.step([(0, tokens)])
    for index, layer in enumerate(run.kv):
        run.kv[index] = LayerCache(layer.k.clone(), layer.v.clone())
        layer.k.fill_(torch.nan)
        layer.v.fill_(torch.nan)
    again = prompt(1, seed=1)
    expected = expected_logits(reference, torch.cat([tokens, again]))
    assert_near(run.step([(0, again)]), expected[20:])


@pytest.mark.skipif(float_kernels() is None, reason="no compiled products of panels")
def test_threads_that_never_work_together_are_given_up(
    models: Callable[..., tuple[Decoder, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder, reference = models("llama", {})
    run, tokens = Run(decoder, "compiled", 1, 16), prompt(20)
    stack = decoder.compiled
    assert isinstance(stack, LayerStack)
    inner, asked = stack._layers.run_layers, []

    def apart(*arguments: Any) -> tuple[bool, bool]:
        asked.append(arguments[-1])
        good, _ = inner(*arguments[:-1], 1)
        return good, arguments[-1] == 1

    monkeypatch.setattr(stack._layers, "run_layers", apart)
    monkeypatch.setattr(stack, "_threads_apart", 0)
    monkeypatch.setattr(threads, "use_torch_threads", lambda: 2)
    found = [run.step([(0, tokens[at : at + 1])]) for at in range(14)]
    assert asked == [2] * 10 + [1] * 4
    assert "layers run on one thread from now on" in caplog.text
    assert_near(torch.cat(found), expected_logits(reference, tokens)[:14])


@pytest.mark.skipif(float_kernels() is None, reason="no compiled products of panels")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k: k.double(), r"kv has a cache of torch.float64"),
        (lambda k: k.transpose(0, 1), r"in all layers, contiguous \(4, 16, "),
        (lambda k: k.transpose(0, 1).contiguous().transpose(0, 1), r"contiguous \(4, 16, "),
        (lambda k: k[:3].contiguous(), r"kv has a cache of torch.float32 \(3, 16, "),
    ],
    ids=["dtype", "shape", "strides", "pages"],
)
def test_compiled_layers_refuse_caches_that_do_not_fit(
    models: Callable[..., tuple[Decoder, Any]],
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    decoder, _ = models("llama", {})
    run = Run(decoder, "compiled", 1, 16)
    run.kv[-1] = LayerCache(run.kv[-1].k, change(run.kv[-1].v))
    with pytest.raises(ValueError, match=message):
        run.step([(0, prompt(3))])


@pytest.mark.skipif(float_kernels() is None, reason="no compiled products of panels")
def test_compiled_layers_refuse_a_plan_of_other_pages(
    models: Callable[..., tuple[Decoder, Any]],
) -> None:
    decoder, _ = models("llama", {})
    run = Run(decoder, "compiled", 1, 16)
    run.step([(0, prompt(3))])
    run.page_size = 32
    with pytest.raises(ValueError, match=r"in all layers, contiguous \(4, 32, "):
        run.step([(0, prompt(3))])


@pytest.mark.parametrize("backend", ["reference", COMPILED])
def test_needs_the_cache_of_every_layer(
    models: Callable[..., tuple[Decoder, Any]], backend: str
) -> None:
    decoder, _ = models("llama", {})
    run = Run(decoder, backend, 1, 16)
    run.kv.pop()
    with pytest.raises(ValueError, match="zip" if backend == "reference" else "kv has caches of"):
        run.step([(0, prompt(3))])


def test_rows_are_taken_before_the_last_layers_projections(
    models: Callable[..., tuple[Decoder, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that nothing reads are not computed: the feed-forward sees 2 of 20."""
    decoder, _ = models("llama", {})
    seen: list[int] = []
    for layer in decoder.layers:
        layer.down.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    Run(decoder, "reference", 1, 16).step([(0, prompt(20))], rows=[3, 19])
    assert seen == [20, 2]


def test_bfloat16_stays_near_float32(
    models: Callable[..., tuple[Decoder, Any]], tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    _, reference = models(family, {})
    folder = tiny_checkpoint(family)
    decoder = load_decoder(folder, load_model_config(folder), dtype=torch.bfloat16, device=CPU)
    run = Run(decoder, "reference", 1, 16)
    run.kv = [LayerCache(cache.k.bfloat16(), cache.v.bfloat16()) for cache in run.kv]
    tokens = prompt(20)
    logits = run.step([(0, tokens)])
    theirs = expected_logits(reference.bfloat16(), tokens)
    assert logits.dtype == torch.float32
    # transformers rounds to bfloat16 in other places: both are as far from float32.
    exact = expected_logits(reference.float(), tokens)
    ours_off, theirs_off = (logits - exact).norm(), (theirs - exact).norm()
    assert ours_off < 1.5 * theirs_off


def test_experts_in_mxfp4_are_those_of_transformers(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Packed at random: 16 bytes of two numbers each, and a scale, for 32 columns."""
    source = tiny_checkpoint("gpt_oss", intermediate_size=96)
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        count, columns, rows = tensors.pop(name).shape
        blocks = (count, rows, columns // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, blocks, dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}_scales"] = torch.randint(
            122, 126, blocks[:3], dtype=torch.uint8, generator=generator
        )
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    decoder = load_decoder(tmp_path, load_model_config(tmp_path), dtype=torch.float32, device=CPU)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        attn_implementation="eager",
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
    )
    tokens = prompt(41)
    ours = Run(decoder, "cpu", 1, 16).step([(0, tokens)])
    torch.testing.assert_close(
        ours, expected_logits(reference.eval(), tokens), atol=1e-3, rtol=1e-3
    )
