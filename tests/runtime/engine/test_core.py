"""The engine against transformers' generate; its limits, its errors, and how it recovers."""

import dataclasses
import random

import pytest
import torch
from reference_engine import reference_engine as engine
from transformers import AutoModelForCausalLM

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report, make_stats
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.request import QueueFull, Unfinished
from coppice.runtime.requests.sampling_params import SamplingParams

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
NEW_TOKENS = 12
LONG = 28
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def make_prompts():
    """Mixed lengths; some share a document, some a system prompt before it, some are repeated."""
    rng = random.Random(1)
    system = [rng.randrange(3, 250) for _ in range(19)]
    document = [rng.randrange(3, 250) for _ in range(41)]
    own = [[rng.randrange(3, 250) for _ in range(rng.randrange(1, 14))] for _ in range(8)]
    return [
        own[0],
        system + own[1],
        system + document + own[2],
        system + document + own[3],
        system + document,
        document + own[4],
        system + document + own[2],
        system + document[:33] + own[5],
        own[6][:1],
        system + document + own[2] + own[7],
    ]


PROMPTS = make_prompts()


def run(engine, prompts, params=GREEDY, **options):
    """Generated tokens of each prompt; every page and lock is recounted after each step."""
    params = params if isinstance(params, list) else [params] * len(prompts)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params[index], **options)
    tokens = {str(index): [] for index in range(len(prompts))}
    finished = {}
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id].extend(output.new_token_ids)
            if output.finish_reason:
                finished[output.request_id] = output
        engine.check()
    report = make_report(engine)
    assert report.pages_held == 0
    assert report.pages_free + report.pages_cached + report.pages_pinned == report.pages_total
    return [tokens[str(i)] for i in range(len(prompts))], [
        finished[str(i)] for i in range(len(prompts))
    ]


@pytest.fixture(scope="session")
def expected(tiny_checkpoint):
    """LONG generated tokens of each of PROMPTS by transformers, one prompt at a time."""
    known = {}

    def generate(family):
        if family not in known:
            model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family)).float().eval()
            known[family] = []
            for prompt in PROMPTS:
                ids = torch.tensor([prompt])
                result = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False,
                    max_new_tokens=LONG, min_new_tokens=LONG,
                    eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
                known[family].append(result[0, len(prompt) :].tolist())
        return known[family]

    return generate


def short(rows):
    return [row[:NEW_TOKENS] for row in rows]


@pytest.mark.model("tokens")
@pytest.mark.pairwise
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({}, id="roomy"),
        pytest.param({"max_num_seqs": 4, "max_num_batched_tokens": 7}, id="small-chunks"),
        pytest.param({"kv_cache_tokens": 128}, id="tiny-pool"),
    ],
)
def test_greedy_tokens_equal_transformers(
    tiny_checkpoint, expected, family, page_size, caching, limits
):
    made = engine(
        tiny_checkpoint(family), page_size=page_size, enable_prefix_caching=caching, **limits
    )
    tiny = "kv_cache_tokens" in limits
    params = dataclasses.replace(GREEDY, max_tokens=LONG) if tiny else GREEDY
    tokens, _ = run(made, PROMPTS, params)
    assert tokens == [row[: params.max_tokens] for row in expected(family)]
    if caching:
        again, outputs = run(made, PROMPTS, params)
        assert again == tokens
    report = make_report(made)
    if not caching:
        assert report.hit_tokens == 0
    elif not tiny:
        # The second time all but the last token of every prompt is hit, whatever the page size.
        assert [o.cached_tokens for o in outputs] == [len(prompt) - 1 for prompt in PROMPTS]
    else:
        assert report.evicted_tokens > 0
    if tiny and page_size < 64:
        assert report.preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_warm_request_has_the_logits_of_a_cold_one(tiny_checkpoint, family, page_size):
    made = engine(tiny_checkpoint(family), page_size=page_size)
    seen = []
    forward = made.runner.decoder.forward

    def recording(*args):
        logits = forward(*args)
        seen.append(logits.clone())
        return logits

    made.runner.decoder.forward = recording
    one = SamplingParams(temperature=0, max_tokens=1)
    prompt = PROMPTS[3]
    _, (cold,) = run(made, [prompt], one)
    _, (warm,) = run(made, [prompt], one)
    # A third one diverges inside a page and is computed after a copied page.
    other = [*prompt[:50], 1, *prompt[51:]]
    run(made, [other], one)
    made.reset_cache()
    run(made, [other], one)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, len(prompt) - 1)
    torch.testing.assert_close(seen[1], seen[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(seen[2], seen[3], atol=1e-4, rtol=0)


def test_hits_are_exact_to_the_token_and_kept_apart_by_salt(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"), page_size=16)
    prompt = PROMPTS[2]
    run(made, [prompt])
    _, (output,) = run(made, [[*prompt[:37], 1, 1]])
    assert output.cached_tokens == 37
    _, (output,) = run(made, [prompt], cache_salt="someone else")
    assert output.cached_tokens == 0
    _, (output,) = run(made, [prompt], cache_salt="someone else")
    assert output.cached_tokens == len(prompt) - 1


def test_a_salt_that_is_too_long_is_refused(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"))
    run(made, [PROMPTS[1]], cache_salt="é" * 1024)
    message = "cache_salt must have at most 1024 characters, got 1025"
    with pytest.raises(ValueError, match=message):
        made.add_request("a", PROMPTS[1], GREEDY, cache_salt="é" * 1025)
    with pytest.raises(ValueError, match=message):
        made.pin("p", PROMPTS[1], cache_salt="é" * 1025)
    assert not made.has_unfinished() and not made.pins


def test_requests_submitted_together_compute_their_common_prefix_once(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"))
    rng = random.Random(2)
    document = [rng.randrange(3, 250) for _ in range(100)]
    run(made, [[*document, i, i] for i in range(3, 11)])
    report = make_report(made)
    assert report.requests == 8
    assert report.prompt_tokens == 8 * 102
    assert report.computed_tokens == 102 + 7 * 2
    assert report.hit_tokens == 7 * 100
    assert report.hit_rate == pytest.approx(700 / 816)
    top = report.top_prefixes[0]
    assert top.token_ids == tuple(document)
    assert (top.hits, top.tokens_saved) == (7, 700)
    assert report.generated_tokens == 8 * NEW_TOKENS
    assert report.time_saved_seconds > 0


def test_shared_stretches_reach_the_attention_plan(tiny_checkpoint, monkeypatch):
    made = engine(tiny_checkpoint("llama"), page_size=4)
    plans = []
    prepare = made.runner.attention.prepare

    def recording(plan, **options):
        plans.append(plan)
        return prepare(plan, **options)

    monkeypatch.setattr(made.runner.attention, "prepare", recording)
    run(made, PROMPTS[2:4])
    shared = (19 + 41) // 4
    last = plans[-2]  # the leader ends a step earlier than its follower
    assert [(s.first_page, s.num_pages, s.members.tolist()) for s in last.stretches] == [
        (0, shared, [0, 1])
    ]


def test_sampling_is_repeatable_by_seed_beside_any_requests(tiny_checkpoint):
    made = engine(tiny_checkpoint("qwen2"), kv_cache_tokens=192)
    params = [
        SamplingParams(temperature=1.0, seed=index, max_tokens=10, top_k=index * 5, ignore_eos=True)
        for index in range(len(PROMPTS))
    ]
    together, _ = run(made, PROMPTS, params)
    alone = [run(made, [p], s)[0][0] for p, s in zip(PROMPTS, params, strict=True)]
    assert together == alone
    other, _ = run(made, PROMPTS, SamplingParams(temperature=1.0, seed=99, max_tokens=10))
    assert other != together


def test_ends(tiny_checkpoint, expected):
    made = engine(tiny_checkpoint("llama"))
    prompt, tokens = PROMPTS[1], expected("llama")[1][:NEW_TOKENS]
    stop = tokens[4]
    first = tokens.index(stop)
    params = SamplingParams(temperature=0, stop_token_ids=[stop], ignore_eos=True)
    (got,), (output,) = run(made, [prompt], params)
    assert got == tokens[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)

    # The stop token is forbidden before min_tokens.
    longer = SamplingParams(
        temperature=0, stop_token_ids=[stop], min_tokens=first + 3, ignore_eos=True
    )
    (got,), _ = run(made, [prompt], longer)
    assert len(got) >= first + 3 and stop not in got[: first + 3]

    made = engine(tiny_checkpoint("llama", eos_token_id=stop))
    (got,), (output,) = run(made, [prompt], SamplingParams(temperature=0, max_tokens=12))
    assert got == tokens[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)

    (got,), (output,) = run(made, [prompt], GREEDY)
    assert got == tokens and output.finish_reason == "length"


def test_the_models_length_ends_a_sequence(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"), max_model_len=24)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (got,), (output,) = run(made, [PROMPTS[1][:20]], params)
    assert len(got) == 4 and output.finish_reason == "length"


def test_a_sequence_may_fill_the_whole_pool(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"), kv_cache_tokens=64, page_size=16)
    prompt = PROMPTS[3][:60]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    first, _ = run(made, [prompt, prompt[:50]], params)
    second, _ = run(made, [prompt, prompt[:50]], params)
    assert [len(tokens) for tokens in first] == [4, 14]
    assert first == second


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one token"),
        ([1] * 64, "shorter than 64 tokens"),
        ([1] * 5000, "shorter than 64 tokens"),
        ([1, -1], "from 0 to .* got -1"),
        ([1, 10**6], "from 0 to .* got 1000000"),
        ([1, "a"], "got 'a'"),
        ([1, True], "got True"),
        ([1, 2.0], r"got 2\.0"),
    ],
)
def test_bad_prompts_are_refused_and_nothing_is_queued(tiny_checkpoint, prompt, message):
    made = engine(tiny_checkpoint("llama"), kv_cache_tokens=64)
    with pytest.raises(ValueError, match=message):
        made.add_request("a", prompt, GREEDY)
    assert not made.has_unfinished()
    assert made.step() == []
    made.check()


def test_a_prompt_longer_than_the_model_is_refused(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"), max_model_len=32)
    with pytest.raises(ValueError, match=r"shorter than 32 tokens \(max_model_len\)"):
        made.add_request("a", [1] * 32, GREEDY)


def test_duplicate_ids_and_bad_stop_tokens_are_refused(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"))
    made.add_request("a", [1], GREEDY)
    with pytest.raises(ValueError, match="request_id"):
        made.add_request("a", [1], GREEDY)
    with pytest.raises(ValueError, match="stop_token_ids"):
        made.add_request("b", [1], SamplingParams(stop_token_ids=[10**6]))


def test_abort_at_every_stage_gives_the_pages_back_and_keeps_the_work(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"), max_num_seqs=4, max_num_batched_tokens=16)
    prompt = PROMPTS[2]
    made.add_request("waiting", prompt, GREEDY)
    assert made.abort("waiting")
    made.add_request("prefill", prompt, GREEDY)
    made.step()
    made.step()
    assert made.abort("prefill")
    made.check()
    assert make_report(made).pages_held == 0
    made.add_request("decode", prompt, GREEDY)
    generated = 0
    while generated < 5:
        generated += sum(len(output.new_token_ids) for output in made.step())
    assert made.abort("decode")
    made.check()
    assert make_report(made).pages_held == 0
    assert not made.abort("decode") and not made.abort("never seen")
    assert not made.has_unfinished()
    # What both computed is hit: the prompt and four of the generated tokens.
    tokens, _ = run(made, [prompt])
    _, (output,) = run(made, [[*prompt, *tokens[0][:8]]])
    assert output.cached_tokens == len(prompt) + 7
    assert make_report(made).computed_tokens < 2 * len(prompt)


def test_a_failing_step_ends_its_requests_and_the_engine_continues(tiny_checkpoint, expected):
    made = engine(tiny_checkpoint("llama"), max_num_seqs=2)
    run(made, PROMPTS[:2])
    forward = made.runner.decoder.forward
    calls = []

    def failing(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return forward(*args)

    made.runner.decoder.forward = failing
    got, outputs = run(made, PROMPTS)
    failed = [output for output in outputs if output.finish_reason == "error"]
    assert 1 <= len(failed) <= 2
    assert all("out of luck" in output.error for output in failed)
    for index, output in enumerate(outputs):
        if output.finish_reason != "error":
            assert got[index] == short(expected("llama"))[index]
    made.runner.decoder.forward = forward
    again, _ = run(made, PROMPTS)
    assert again == short(expected("llama"))


def test_a_page_that_is_lost_is_reported_and_repaired(tiny_checkpoint, expected, caplog):
    made = engine(tiny_checkpoint("llama"))
    run(made, PROMPTS[:2])
    made.tree.pool.allocate(1)  # a leak
    made.add_request("a", PROMPTS[0], GREEDY)
    while made.has_unfinished():
        made.step()
    assert "page accounting is off" in caplog.text
    tokens, _ = run(made, PROMPTS[:1])
    assert tokens == short(expected("llama"))[:1]
    assert make_report(made).pages_total == made.tree.pool.num_pages


def test_the_accounts_are_settled_between_steps(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr("coppice.radix.accounting.ledger._BATCH_WORK", 12)
    made = engine(tiny_checkpoint("llama"))
    run(made, PROMPTS)
    assert len(made.accounts._accounting._waiting) < 6, "they are settled before anyone asks"
    counts = made.accounts.snapshot().overall.since_start
    assert counts.requests == len(PROMPTS)


def test_reset_is_refused_while_requests_run(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"))
    made.add_request("a", PROMPTS[0], GREEDY)
    with pytest.raises(Unfinished, match="refused while 1 requests are unfinished"):
        made.reset_cache()
    while made.has_unfinished():
        made.step()
    made.reset_cache()
    assert make_report(made).pages_free == make_report(made).pages_total


def test_the_memory_arithmetic_is_reported(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"), kv_cache_tokens=160)
    config = made.model_config
    each = 2 * config.num_layers * 16 * config.num_kv_heads * config.head_dim * 4
    assert f"2 (K, V) x {config.num_layers} layers x 16 tokens" in made.memory
    assert "10 pages = 160 tokens" in made.memory
    assert each == sum(t[0].numel() * 4 for kv in made.runner.kv_cache for t in (kv.k, kv.v))
    with pytest.raises(ValueError, match=r"max_model_len=512 tokens do not fit.*at most 160"):
        engine(tiny_checkpoint("llama"), kv_cache_tokens=160, max_model_len=512)
    with pytest.raises(ValueError, match="room for at least 2 tokens"):
        engine(tiny_checkpoint("llama"), kv_cache_tokens=8)
    fraction = engine(tiny_checkpoint("llama"), kv_cache_tokens=None, kv_cache_memory_fraction=1e-4)
    assert "kv_cache_memory_fraction" in fraction.memory and fraction.num_pages > 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", ""),
        ("dtype", "int4"),
        ("device", "tpu"),
        ("kv_cache_dtype", "fp4"),
        ("deterministic", 1),
        ("load_format", "pickle"),
        ("quantization", "int3"),
        ("page_size", 0),
        ("kv_cache_tokens", 0),
        ("kv_cache_memory_fraction", 0),
        ("kv_cache_memory_fraction", 1.5),
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 63),
        ("enable_prefix_caching", "yes"),
        ("eviction_policy", "mru"),
        ("scheduling_policy", "sjf"),
        ("max_queued_requests", 0),
        ("max_queued_tokens", "many"),
        ("pin_budget", 1.5),
    ],
)
def test_bad_options_are_refused_by_name(option, value):
    with pytest.raises(ValueError, match=option):
        EngineConfig(**{"model": "demo", option: value})


def test_an_unknown_attention_backend_and_too_long_a_length_are_refused(tiny_checkpoint):
    with pytest.raises(ValueError, match="attention_backend"):
        engine(tiny_checkpoint("llama"), attention_backend="abacus")
    with pytest.raises(ValueError, match="max_model_len must be at most"):
        engine(tiny_checkpoint("llama"), max_model_len=10**7, kv_cache_tokens=2 * 10**7)


def test_a_type_that_the_attention_backend_does_not_support_is_refused(tiny_checkpoint):
    config = EngineConfig(model=str(tiny_checkpoint("llama")), dtype="float16")
    told = "dtype is 'float16'; with the cpu attention backend .* 'float32' or 'bfloat16'"
    with pytest.raises(ValueError, match=told):
        Engine(config)


def test_a_pin_keeps_its_prefix_and_leaves_room_for_requests(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"), kv_cache_tokens=64, page_size=4, pin_budget=0.5)
    handbook = list(range(1, 17))
    run(made, [[*handbook, 20, 21]])
    made.pin("handbook", handbook, ttl=3600)
    for start in range(3):
        run(made, [[50 + start] * 36])
        made.check()
    assert made.tree.match(handbook, made.intake.namespace(None)).length == 16
    with pytest.raises(ValueError, match=r"shorter than 48 tokens \(the part .* no pin keeps"):
        made.add_request("long", [1] * 48, SamplingParams(max_tokens=1))
    made.add_request("c", [60] * 44, SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match="pin 'more': a request that may grow to 48 tokens"):
        made.pin("more", [70, 71, 72, 73])
    while made.has_unfinished():
        made.step()
        made.check()
    with pytest.raises(ValueError, match="pin 'much' needs"):
        made.pin("much", [9] * 32)
    made.pin("little", [9] * 4)
    assert made.unpin("little") and not made.unpin("little")
    made.reset_cache()
    assert len(made.pins) == 0
    assert made.tree.cached_tokens == 0
    made.check()


def test_a_pin_expires_though_no_step_is_made(tiny_checkpoint):
    """Any call to an idle engine finds only the pins that have not expired by then."""
    made = engine(tiny_checkpoint("llama"), kv_cache_tokens=64, page_size=4, pin_budget=0.5)
    now = 0.0
    made.pins.clock = lambda: now
    asked = {
        "request": lambda: made.add_request("a", [1] * 48, SamplingParams(max_tokens=1)),
        "beams": lambda: made.add_beam_search("b", [1] * 48, BeamSearchParams(1, max_tokens=1)),
        "another pin": lambda: made.pin("new", [2] * 32),
        "stats": lambda: make_stats(made).num_pins == 0 or pytest.fail("it is counted"),
        "report": lambda: not make_report(made).pins or pytest.fail("it is listed"),
    }
    for what, ask in asked.items():
        made.pin("old", [1] * 32, ttl=10)
        now += 9
        if what in ("request", "beams", "another pin"):
            with pytest.raises(ValueError, match="pin"):
                ask()
        assert [pin.name for pin in made.pins] == ["old"]
        now += 1
        ask()
        assert "old" not in [pin.name for pin in made.pins], what
        made.abort("a")
        made.abort("b")
        made.unpin("new")
        made.check()


def test_load_is_shed_with_a_clear_refusal(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"), max_queued_requests=2, max_queued_tokens=40)
    made.add_request("a", [1] * 20, GREEDY)
    with pytest.raises(QueueFull, match="20 of max_queued_tokens 40 wait, and this request brings"):
        made.add_request("b", [1] * 21, GREEDY)
    made.add_request("c", [1] * 10, GREEDY)
    with pytest.raises(QueueFull, match="2 of max_queued_requests 2 wait"):
        made.add_request("d", [1], GREEDY)
    made.step()
    made.add_request("d", [1], GREEDY)
    while made.has_unfinished():
        made.step()
        made.check()


def test_only_requests_that_wait_to_begin_fill_the_queue(tiny_checkpoint):
    """The requests of siblings without a place and of preempted sequences have begun."""
    limits = {"max_queued_requests": 1, "max_queued_tokens": 20}
    made = engine(tiny_checkpoint("llama"), max_num_seqs=2, **limits)
    made.add_request("a", [1] * 20, SamplingParams(n=6, max_tokens=5, ignore_eos=True))
    made.step()
    made.step()
    assert len(made.scheduler.waiting) == 4
    made.add_request("b", [1] * 20, GREEDY)
    with pytest.raises(QueueFull, match="1 of max_queued_requests 1 wait"):
        made.add_request("c", [1], GREEDY)
    while made.has_unfinished():
        made.step()
        made.check()


def test_a_better_class_goes_first_and_takes_the_place_of_a_worse_one(tiny_checkpoint, expected):
    made = engine(tiny_checkpoint("llama"), max_num_seqs=2, scheduling_policy="priority")
    for name in ("a", "b"):
        made.add_request(name, PROMPTS[0], GREEDY, priority=5)
    made.step()
    made.add_request("late", PROMPTS[1], GREEDY, priority=6)
    made.add_request("urgent", PROMPTS[2], GREEDY, priority=-1)
    ends = []
    while made.has_unfinished():
        ends += [each.request_id for each in made.step() if each.finish_reason]
        made.check()
    assert ends[0] in ("a", "b", "urgent")
    assert ends.index("urgent") < 2
    assert ends[-1] == "late"
    assert made.counters.preemptions == 1


def test_priority_needs_its_policy(tiny_checkpoint):
    made = engine(tiny_checkpoint("llama"))
    with pytest.raises(ValueError, match="priority needs scheduling_policy 'priority'"):
        made.add_request("a", [1], GREEDY, priority=1)
    assert not made.has_unfinished()
