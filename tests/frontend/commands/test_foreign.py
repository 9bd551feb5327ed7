"""Flags of vLLM and SGLang: each works, or is answered with our name and what to do."""

from __future__ import annotations

import argparse
import re
from functools import cache
from typing import Any

import pytest

from coppice.frontend.commands.foreign import flag
from coppice.frontend.commands.main import build_parser, main
from coppice.frontend.commands.options import engine_options
from coppice.frontend.python.foreign_options import (
    FOREIGN,
    RARE,
    SHORT,
    VALUES,
    Granted,
    Missing,
    Renamed,
    Reversed,
    translate,
)
from coppice.runtime.config import EngineConfig

PARSER = cache(build_parser)  # it takes a while, and keeps nothing


def parse(*arguments: str, command: str = "serve") -> argparse.Namespace:
    return PARSER().parse_args([command, "m", *arguments])


def own_flags(command: str) -> dict[str, argparse.Action]:
    actions: Any = PARSER()._actions
    (found,) = (each for each in actions if isinstance(each, argparse._SubParsersAction))
    parser = found.choices[command]
    return {
        form: action
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for form in action.option_strings
    }


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_each_flag_of_the_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = FOREIGN[name]
    own = own_flags("serve")
    match foreign:
        case Renamed(ours):
            action = own[flag(ours)]
            assert flag(name) in action.option_strings
            assert name not in {other.dest for other in own.values()}, "it is ours by now"
        case Reversed(ours):
            assert getattr(parse(flag(name)), ours) is False
            assert flag(ours) in own
        case Granted(why, values):
            good = [flag(name)] if foreign.is_switch else [flag(name), values[0]]
            parse(*good)
            noted = capsys.readouterr().err
            assert noted.startswith(f"coppice serve: {flag(name)}: ")
            assert same(why, noted)
            if not foreign.is_switch:
                with pytest.raises(SystemExit):
                    parse(f"{flag(name)}=another")
                assert same(why, capsys.readouterr().err)
        case Missing(instead):
            assert flag(name) not in own, "it is ours by now"
            for form in ([flag(name)], [flag(name), "x"], [f"{flag(name)}=x"]):
                with pytest.raises(SystemExit) as stopped:
                    parse(*form)
                assert stopped.value.code == 2
                error = capsys.readouterr().err
                assert f"error: {flag(name)} is not an option here: " in error
                assert same(instead, error)


def same(text: str, printed: str) -> bool:
    """Whether a text of the table was printed, with names of options as flags."""
    return text.replace("_", "-") in printed.replace("--", "").replace("_", "-")


def test_what_a_vllm_user_types(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--tensor-parallel-size 2 -pp 1 --trust-remote-code --enable-auto-tool-choice --dtype half "
        "--block-size=32 --max-model-len 64 --max-num-seqs 4 --swap-space 0 --enforce-eager "
        "--no-enable-prefix-caching --kv-cache-dtype fp8_e4m3 --seed 3 --disable-log-requests "
        "--api-server-count 1"
    )
    config = EngineConfig(model="m", **engine_options(parse(*words.split())))
    assert config.dtype == "float16" and config.kv_cache_dtype == "fp8"
    assert (config.page_size, config.max_model_len, config.max_num_seqs) == (32, 64, 4)
    assert config.enforce_eager and not config.enable_prefix_caching and config.seed == 3
    assert config.tensor_parallel_size == 2
    assert len(capsys.readouterr().err.splitlines()) == 6


def test_what_an_sglang_user_types() -> None:
    words = (
        "--tp 1 --context-length 64 --schedule-policy fcfs --max-running-requests 4 "
        "--chunked-prefill-size 512 --disable-radix-cache --max-total-tokens 4096 --random-seed 3 "
        "--disable-cuda-graph --page-size 8 --enable-metrics --radix-eviction-policy lfu"
    )
    config = EngineConfig(model="m", **engine_options(parse(*words.split())))
    assert config == EngineConfig(
        model="m",
        max_model_len=64,
        scheduling_policy="fcfs",
        max_num_seqs=4,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        kv_cache_tokens=4096,
        seed=3,
        enforce_eager=True,
        page_size=8,
        eviction_policy="lfu",
        overtaking=0.15,
        max_step_stretch=2.5,
    )


@pytest.mark.parametrize("command", ["serve", "generate", "plan", "models"])
def test_what_few_people_set_is_answered_too(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [] if command == "models" else ["m"]
    for name, instead in RARE.items():
        for form in (
            [flag(name)],
            [flag(name), "x"],
            [f"{flag(name)}=x"],
            ["--no-" + flag(name)[2:]],
        ):
            with pytest.raises(SystemExit):
                PARSER().parse_args([command, *source, *form])
            error = capsys.readouterr().err
            assert f"{form[0].partition('=')[0]} is not an option here: " in error
            assert same(instead, error)
        with pytest.raises(ValueError, match=f"{name} is not an option here: "):
            translate({name: 1}, {"seed"})


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_other_commands_answer_too(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse("--trust-remote-code", "--block-size", "8", command=command)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parse("--gpu-memory-utilization", "0.9", command=command)
    error = capsys.readouterr().err
    assert f"coppice {command}: error: --gpu-memory-utilization is not an option here" in error
    assert "--kv-cache-memory-fraction" in error
    assert error.startswith(f"usage: coppice {command} [-h] [--help-all] [options] ")


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("bench", "use --kv-cache-memory-fraction"),
        ("simulate", "use kv_cache_memory_fraction"),
        ("replay", "use kv_cache_memory_fraction"),
        ("report", "use kv_cache_memory_fraction"),
        ("demo", "use kv_cache_memory_fraction"),
        ("models", "use kv_cache_memory_fraction"),
    ],
)
def test_commands_that_measure_and_show_answer_too(
    command: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [] if command in ("demo", "models") else ["m"]
    with pytest.raises(SystemExit):
        PARSER().parse_args([command, *source, "--gpu-memory-utilization", "0.9"])
    error = capsys.readouterr().err
    assert f"coppice {command}: error: --gpu-memory-utilization is not an option here" in error
    assert answer in error


def test_an_option_under_another_name_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for command, answer in (
        ("simulate", "--page-size"),
        ("report", "--page-size of coppice serve"),
    ):
        with pytest.raises(SystemExit):
            PARSER().parse_args([command, "m", "--block-size", "8"])
        assert capsys.readouterr().err.endswith(
            f"--block-size is not an option here: it is {answer}\n"
        )


def test_the_table_names_options_that_there_are() -> None:
    """An option of ours in an answer must exist, lest the answer sends people nowhere."""
    own = {action.dest for action in own_flags("serve").values()}
    foreign = set(FOREIGN)
    other = {"cache_salt", "stream_options", "return_token_ids", "cached_tokens", "wake_up",
             "chat_template_kwargs", "system_fingerprint"}  # fmt: skip
    assert not RARE.keys() & (foreign | own)
    for name, text in [*((name, each[0]) for name, each in FOREIGN.items()), *RARE.items()]:
        found = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)) - own - other
        assert not found - {"include_usage"}, (name, found & foreign)
    assert set(SHORT.values()) <= foreign | own
    assert set(VALUES) <= own


def test_a_missing_value_is_missed_in_the_usual_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such", "--trust-remote-code"]) == 2
    assert "model is '/no/such'" in capsys.readouterr().err
