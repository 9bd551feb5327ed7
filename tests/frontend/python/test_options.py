"""The constructor of `LLM` and `AsyncLLM`: the same options as the dataclasses have, typed."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from coppice import LLM, AsyncLLM
from coppice.frontend.python.foreign_options import FOREIGN, Granted, Missing, Renamed, Reversed
from coppice.frontend.python.options import Configured
from coppice.frontend.text.model.options import TextOptions
from coppice.runtime.config import EngineConfig

OPTIONS = [*fields(TextOptions), *fields(EngineConfig)]


class Recorded(Configured):
    """Loads nothing, and keeps its options."""

    def _load(self, config: EngineConfig, text: TextOptions) -> None:
        self.config, self.text = config, text


@pytest.mark.parametrize("made", [LLM, AsyncLLM, Configured])
def test_the_signature_is_that_of_the_dataclasses(made: type) -> None:
    """Names, types, defaults and descriptions: an option that is added must be added here, too."""
    parameters = dict(inspect.signature(made).parameters)
    assert set(parameters) == {option.name for option in OPTIONS}
    hints = get_type_hints(EngineConfig) | get_type_hints(TextOptions)
    found = get_type_hints(inspect.unwrap(Configured.__init__))
    described = " ".join((Configured.__init__.__doc__ or "").split())
    for option in OPTIONS:
        parameter = parameters[option.name]
        assert found[option.name] == hints[option.name], option.name
        if option.default is MISSING:
            assert parameter.default is inspect.Parameter.empty
            continue
        assert parameter.default == option.default, option.name
        text = " ".join(option.metadata["help"].split())
        assert f"{option.name}: {text}." in described, option.name


def test_options_reach_the_dataclass_that_has_them() -> None:
    made = Recorded("m", "t", page_size=4, generation_config="none", cuda_graph_sizes=(1, 2))
    assert made.config == EngineConfig(model="m", page_size=4, cuda_graph_sizes=(1, 2))
    assert made.text == TextOptions("t", "none")


def test_names_of_vllm_and_sglang_are_taken_or_answered() -> None:
    made = Recorded(
        model="m",
        pipeline_parallel_size=1,
        tp=2,
        trust_remote_code=True,
        block_size=32,
        dtype="half",
        disable_radix_cache=True,
        swap_space=0,
    )
    wanted = EngineConfig(
        model="m",
        page_size=32,
        dtype="float16",
        enable_prefix_caching=False,
        tensor_parallel_size=2,
    )
    assert made.config == wanted
    for given, message in (
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size may be 1, got 2: tensor_parallel_size divides",
        ),
        ({"gpu_memory_utilization": 0.9}, "is not an option here: use kv_cache_memory_fraction"),
        ({"block_size": 8, "page_size": 4}, "page_size is given twice"),
        ({"pagesize": 4}, "pagesize: no such option; there is page_size"),
        ({"tensor": 4}, "tensor: no such option; there is "),
    ):
        with pytest.raises(ValueError, match=message):
            Recorded("m", **given)


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_each_foreign_option_has_its_answer(name: str) -> None:
    foreign: Any = FOREIGN[name]
    own = {option.name: option for option in OPTIONS}
    if name in own:
        pytest.skip("answered on the command line only")
    if isinstance(foreign, Renamed | Reversed) and foreign.ours not in own:
        pytest.skip("an option of the server")
    match foreign:
        case Renamed(ours):
            value = own[ours].default
            made = Recorded("m", **{name: value})
            assert getattr(made.text if hasattr(made.text, ours) else made.config, ours) == value
        case Reversed(ours):
            assert getattr(Recorded("m", **{name: True}).config, ours) is False
        case Granted(why, values):
            assert Recorded("m", **{name: values[0]}).config == EngineConfig(model="m")
            with pytest.raises(ValueError, match=f"^{name} may be ") as refused:
                Recorded("m", **{name: "another"})
            assert why in str(refused.value)
        case Missing(instead):
            with pytest.raises(ValueError, match=f"^{name} is not an option here: ") as refused:
                Recorded("m", **{name: 1})
            assert instead in str(refused.value)


def test_a_model_is_loaded_with_vllms_names(checkpoint: Path) -> None:
    with LLM(str(checkpoint), block_size=8, max_total_tokens=256, max_running_requests=2) as llm:  # type: ignore[call-arg]
        config = llm._text_engine.engine.config
        assert (config.page_size, config.kv_cache_tokens, config.max_num_seqs) == (8, 256, 2)
