"""`AsyncLLM`: outputs that grow, requests that end with their loop, and its life."""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio

from coppice import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from coppice.frontend.errors import EngineStopped
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# Drafts of what is drawn so freely are not accepted: each token takes a step.
LONG = SamplingParams(temperature=2.0, max_tokens=400, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "Where is the key?"}]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(checkpoint: Path) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(checkpoint), kv_cache_tokens=4096, max_num_seqs=4) as made:
        yield made


@pytest.fixture(scope="module")
def blocking(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), kv_cache_tokens=4096, max_num_seqs=4)


async def until_idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(20):
        while await llm._engine.ask("has_unfinished"):
            await asyncio.sleep(0.005)
    assert (await llm.cache_report()).pages_held == 0


async def test_outputs_grow_to_what_llm_returns(llm: AsyncLLM, blocking: LLM) -> None:
    (expected,) = blocking.generate("The key", GREEDY)
    seen = [output async for output in llm.generate("The key", GREEDY)]
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    texts = [output.outputs[0].text for output in seen]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert seen[-1].outputs == expected.outputs
    assert seen[-1].prompt == "The key"
    assert seen[-1].prompt_token_ids == expected.prompt_token_ids


async def test_several_at_once_and_n_of_each(llm: AsyncLLM, blocking: LLM) -> None:
    params = SamplingParams(n=2, seed=4, max_tokens=6, ignore_eos=True, logprobs=1)
    prompts = ["The key", {"prompt": "The fox", "cache_salt": "s"}, [1, 2, 3]]

    async def last(prompt: object) -> object:
        found = None
        async for found in llm.generate(prompt, params):  # type: ignore[arg-type]
            assert len(found.outputs) == 2
        assert found is not None
        return found.outputs

    outputs = await asyncio.gather(*map(last, prompts))
    assert outputs == [each.outputs for each in blocking.generate(prompts, params)]  # type: ignore[arg-type]
    best = SamplingParams(n=1, best_of=3, seed=4, max_tokens=4)
    (only,) = [output async for output in llm.generate("The key", best)]
    assert only.outputs == blocking.generate("The key", best)[0].outputs


async def test_chat_beams_and_defaults(llm: AsyncLLM, blocking: LLM) -> None:
    *_, answer = [output async for output in llm.chat(MESSAGES, GREEDY)]
    assert answer.outputs == blocking.chat(MESSAGES, GREEDY)[0].outputs
    beams = BeamSearchParams(2, max_tokens=4)
    found = await llm.beam_search("The key", beams)
    (expected,) = blocking.beam_search("The key", beams)
    assert [each.text for each in found.outputs] == [each.text for each in expected.sequences]
    assert llm.get_default_sampling_params() == SamplingParams()
    *_, default = [output async for output in llm.generate("The key")]
    assert len(default.outputs[0].token_ids) <= 16


async def test_leaving_the_loop_ends_the_request(llm: AsyncLLM) -> None:
    async for _ in llm.generate("The key", LONG):
        break
    gc.collect()
    await until_idle(llm)
    kept = llm.generate("The key", LONG)
    await anext(kept)
    await kept.aclose()
    await until_idle(llm)

    async def read() -> None:
        async for _ in llm.generate("The key", LONG):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until_idle(llm)


UNFOLLOWED = StructuredOutputsParams(regex="a{400000}")


async def test_refusals(llm: AsyncLLM) -> None:
    for prompt, params, message in (
        ("", GREEDY, "prompt must have at least one token"),
        (5, GREEDY, "prompt must be text or token ids"),
        ("x", "greedy", "sampling_params must be a SamplingParams"),
        ([100_000], GREEDY, "prompt token ids must be"),
        ("x", SamplingParams(structured_outputs=UNFOLLOWED), "regex must be a form"),
    ):
        with pytest.raises(ValueError, match=message):
            await anext(llm.generate(prompt, params))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="params must be BeamSearchParams"):
        await llm.beam_search("x", GREEDY)  # type: ignore[arg-type]
    await until_idle(llm)


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep(llm: AsyncLLM, level: int) -> None:
    *_, before = [output async for output in llm.generate("The key", GREEDY)]
    await llm.sleep(level)
    assert await llm.is_sleeping()
    with pytest.raises(ValueError, match="refused while the engine sleeps"):
        await anext(llm.generate("The key", GREEDY))
    await llm.wake_up()
    assert not await llm.is_sleeping()
    *_, after = [output async for output in llm.generate("The key", GREEDY)]
    assert after.cached_tokens == 0
    assert after.outputs == before.outputs
    await llm.reset_prefix_cache()


@pytest.mark.slow
async def test_it_is_shut_down_for_good(checkpoint: Path) -> None:
    llm = AsyncLLM(str(checkpoint), kv_cache_tokens=512, max_num_seqs=2)
    running = llm.generate("The key", LONG)  # starts the engine
    assert not (await anext(running)).finished
    await llm.shutdown()
    await llm.shutdown()
    with pytest.raises(EngineStopped):
        async for _ in running:
            pass
    with pytest.raises(RuntimeError, match="was shut down"):
        await anext(llm.generate("The key", GREEDY))


async def test_its_calls_are_those_of_llm() -> None:
    """Under the same names with the same first arguments, so that code moves over easily."""
    for name in ("generate", "chat", "sleep", "wake_up", "reset_prefix_cache", "shutdown"):
        ours, other = (
            inspect.signature(getattr(each, name)).parameters for each in (AsyncLLM, LLM)
        )
        assert list(ours)[2:3] == list(other)[2:3], name


@pytest.mark.timeout(180)
async def test_a_script_that_does_not_shut_down_ends(checkpoint: Path) -> None:
    """Python waits for an engine that it has asked to end; none may be left, either."""
    script = textwrap.dedent(f"""
        import asyncio
        from coppice import AsyncLLM

        async def main():
            llm = AsyncLLM({str(checkpoint)!r}, kv_cache_tokens=512)
            async for output in llm.generate("The key"):
                pass
            print(llm._engine._engine.pid, flush=True)
            raise SystemExit(7)

        if __name__ == "__main__":
            asyncio.run(main())
    """)
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 7, done.stderr
    assert not Path(f"/proc/{int(done.stdout)}").exists()
