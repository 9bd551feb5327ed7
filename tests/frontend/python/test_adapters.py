"""Adapters in the Python API, for one thread and for coroutines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from adapter_files import greedy_by, load, merged, save_adapter

from coppice import LLM, AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from coppice.frontend.client.engine import EngineClient
    from coppice.frontend.text.engine import TextEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
PROMPT = [9, 8, 7, 60, 61, 62, 63]


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    folder = tmp_path_factory.mktemp("adapter")
    return LoRARequest("french", 1, str(save_adapter(folder, load(checkpoint))))


@pytest.fixture(scope="module")
def expected(checkpoint: Path, adapter: LoRARequest) -> tuple[list[int], list[int]]:
    """Tokens of the base model, and of the adapter."""
    base = greedy_by(load(checkpoint), PROMPT, 5)
    own = greedy_by(merged(checkpoint, Path(adapter.lora_path)), PROMPT, 5)
    assert base != own
    return base, own


def test_prompts_of_one_call_have_adapters_of_their_own(
    checkpoint: Path, adapter: LoRARequest, expected: tuple[list[int], list[int]]
) -> None:
    llm = LLM(str(checkpoint), kv_cache_tokens=1024, max_num_seqs=4, enable_lora=True)
    base, own = expected
    both = llm.generate([PROMPT, PROMPT], GREEDY, lora_request=[None, adapter])
    assert [list(output.outputs[0].token_ids) for output in both] == [base, own]
    one = llm.generate([PROMPT, PROMPT], GREEDY, lora_request=adapter)
    assert [list(output.outputs[0].token_ids) for output in one] == [own, own]
    assert llm.list_loras() == [adapter]
    beams = llm.beam_search(PROMPT, BeamSearchParams(1, 5, ignore_eos=True), lora_request=adapter)
    assert list(beams[0].sequences[0].tokens[-5:]) == own
    turns = [{"role": "user", "content": "The key"}]
    answers = [llm.chat(turns, GREEDY, lora_request=each)[0] for each in (None, adapter)]
    assert answers[0].outputs[0] != answers[1].outputs[0]
    with pytest.raises(ValueError, match="one for each of the 2 prompts"):
        llm.generate([PROMPT, PROMPT], GREEDY, lora_request=[adapter])
    with pytest.raises(ValueError, match="must be a LoRARequest or None, got 'french'"):
        llm.generate([PROMPT], GREEDY, lora_request=["french"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"prompts\[0\]: lora_path: it is '/none'"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("other", 2, "/none"))
    llm.remove_lora("french")
    assert llm.list_loras() == []
    llm.add_lora(adapter)
    assert list(llm.generate(PROMPT, GREEDY, lora_request=adapter)[0].outputs[0].token_ids) == own
    llm.shutdown()


def test_coroutines(
    text_engine_with_adapters: TextEngine,
    engine_client: Callable[..., EngineClient],
    adapter: LoRARequest,
    expected: tuple[list[int], list[int]],
    checkpoint: Path,
) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(checkpoint), kv_cache_tokens=1024, enable_lora=True)
        llm._engine = engine_client(text_engine_with_adapters)

        async def tokens(asked: LoRARequest | None) -> list[int]:
            found: list[int] = []
            async for output in llm.generate(PROMPT, GREEDY, lora_request=asked):
                found = list(output.outputs[0].token_ids)
            return found

        both = await asyncio.gather(tokens(None), tokens(adapter))
        assert both == list(expected)
        await llm.remove_lora("french")
        assert await llm.list_loras() == []
        await llm.add_lora(adapter)
        assert await llm.list_loras() == [adapter]
        with pytest.raises(ValueError, match="must be a LoRARequest or None"):
            await tokens("french")  # type: ignore[arg-type]
        await llm.shutdown()

    asyncio.run(main())


@pytest.fixture
def text_engine_with_adapters(checkpoint: Path) -> TextEngine:
    from coppice.frontend.text.engine import TextEngine
    from coppice.runtime.config import EngineConfig

    return TextEngine.load(
        EngineConfig(model=str(checkpoint), kv_cache_tokens=1024, max_num_seqs=4, enable_lora=True)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", 1, "a"), "lora_name must be a text that is not empty, got ''"),
        (("a", 0, "a"), "lora_int_id must be an integer of at least 1, got 0"),
        (("a", True, "a"), "lora_int_id must be"),
        (("a", 1, " "), "lora_path must be"),
    ],
)
def test_requests_that_are_refused(fields: tuple[str, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRARequest(*fields)
