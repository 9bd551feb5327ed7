"""On a CPU nothing is compiled, and no kernel imported, once an engine has warmed up."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from mixed_requests import make_engine, make_prompts

from coppice.runtime.requests.sampling_params import SamplingParams

SCRIPT = """
import gc, json, random, sys

from numba.core.dispatcher import Dispatcher

from coppice import Engine, EngineConfig
from coppice.runtime.requests.sampling_params import SamplingParams


def code():
    # Of each compiled function how many variants there are, whether compiled now or read from disk.
    found = {}
    for each in gc.get_objects():
        if isinstance(each, Dispatcher) and each.py_func.__module__.startswith("coppice."):
            name = each.py_func.__module__, each.py_func.__qualname__
            found["%s.%s" % name] = found.get("%s.%s" % name, 0) + len(each.overloads)
    kernels = [name for name in sys.modules if name.startswith("coppice.kernels.")]
    return found | dict.fromkeys(kernels, -1)


options = json.loads(sys.argv[2])
engine = Engine(EngineConfig(model=sys.argv[1], device="cpu", kv_cache_tokens=4096, **options))
engine.warm_up()
before = code()
rng = random.Random(1)
common = {"max_tokens": 12, "ignore_eos": True}
kinds = [
    SamplingParams(temperature=0, **common),
    SamplingParams(temperature=0.9, n=2, top_k=7, seed=1, **common),
    SamplingParams(temperature=0, repetition_penalty=1.2, **common),
    SamplingParams(temperature=0, logprobs=3, prompt_logprobs=1, **common),
    SamplingParams(temperature=0.9, top_p=0.5, **common),
]
words = [rng.randrange(3, 100) for _ in range(20)]
for number, params in enumerate(kinds):
    prompt = words * 3 + [rng.randrange(3, 100) for _ in range(100 * number)]
    engine.add_request(str(number), prompt, params)
    for output in engine.step():
        assert output.error is None
while engine.has_unfinished():
    for output in engine.step():
        assert output.error is None
after = code()
print(json.dumps([len(before), sum(n for n in before.values() if n > 0), engine.runner.warmed,
                  {name: n for name, n in after.items() if n != before.get(name)}]))
"""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="float32"),
        pytest.param(
            {"dtype": "bfloat16", "speculation": "off"}, id="bfloat16", marks=pytest.mark.slow
        ),
    ],
)
def test_requests_of_every_kind_compile_nothing_after_warming_up(tiny_checkpoint, options):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_checkpoint("llama")), json.dumps(options)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    functions, variants, warmed, later = json.loads(done.stdout.splitlines()[-1])
    assert functions > 50 and variants > 5
    assert warmed.startswith(f"warming up {3 if 'speculation' in options else 4} kinds of steps")
    assert later == {}


@pytest.mark.parametrize("most", [1, 5, 512])
def test_steps_with_drafts_are_timed_where_nothing_is_compiled(tiny_checkpoint, most):
    engine = make_engine(
        tiny_checkpoint("llama"), device="cpu", max_num_batched_tokens=most, max_num_seqs=1
    )
    engine.warm_up()
    timed = [drafted for drafted, _ in engine.runner.draft_seconds]
    assert timed == [each for each in (0, 1, 2, 4, 8, 16, 32, 48) if each < most]
    assert all(seconds > 0 for _, seconds in engine.runner.draft_seconds)
    engine.add_request("0", make_prompts(9)[0], SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
    assert (engine.drafts.costs.curve(1) is None) == (most == 1)
