"""The command line: its output, and its errors."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from adapter_files import load, save_adapter

from coppice import LLM, LoRARequest, SamplingParams
from coppice.frontend.client.process import EngineProcess
from coppice.frontend.commands.main import build_parser, main
from coppice.frontend.commands.options import add_engine_options, engine_options
from coppice.frontend.commands.parser import CommandParser
from coppice.runtime.config import EngineConfig

COPPICE = Path(sys.executable).parent / "coppice"
SMALL = ("--kv-cache-tokens", "2048", "--max-num-seqs", "4")
GREEDY = ("--temperature", "0")


def generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Standard output of a `generate` that succeeds."""
    assert main(["generate", *arguments, *SMALL, *GREEDY]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, str]:
    """Greedy texts of two prompts, from the Python API."""
    llm = LLM(str(checkpoint), kv_cache_tokens=2048, max_num_seqs=4)
    prompts = ["The key is", "Where is the fox?"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8))
    return {prompt: o.outputs[0].text for prompt, o in zip(prompts, outputs, strict=True)}


def test_one_prompt_prints_only_its_text(
    checkpoint: Path, expected: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "The key is"
    out = generate(capsys, str(checkpoint), "--prompt", prompt, "--max-tokens", "8")
    assert out == expected[prompt] + "\n"


def test_several_prompts_from_each_source(
    checkpoint: Path,
    expected: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(expected) + "\n\n", encoding="utf-8")
    wanted = "\n\n".join(
        f"[{index}/2] {prompt}\n{text}" for index, (prompt, text) in enumerate(expected.items(), 1)
    )
    length = ("--max-tokens", "8")
    options = [part for prompt in expected for part in ("--prompt", prompt)]
    assert generate(capsys, str(checkpoint), *options, *length) == wanted + "\n"
    assert generate(capsys, str(checkpoint), "--prompts-file", str(file), *length) == wanted + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(file.read_text(encoding="utf-8")))
    assert generate(capsys, str(checkpoint), *length) == wanted + "\n"


def test_chat_and_report(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = "The quick brown fox jumps over the lazy dog while the band plays on. " * 4
    prompts = ("--prompt", shared + "Where?", "--prompt", shared + "When?")
    out = generate(capsys, str(checkpoint), *prompts, "--chat", "--report", "--max-tokens", "4")
    assert f"[2/2] {shared}When?" in out
    assert "hit rate" in out
    assert "Top shared prefixes" in out
    assert "<|user|>The quick" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature must be a number from 0 to 100, got -1.0"),
        (["--max-tokens", "0"], "max_tokens must be an integer from 1"),
        (["--page-size", "0"], "page_size must be an integer of at least 1, got 0"),
        (["--dtype", "float8"], "dtype must be one of auto"),
        (["--prompts-file", "/no/such/file"], "prompts-file cannot be read"),
        (["--kv-cache-tokens", "64", "--prompt", "x" * 500], "prompt must be shorter than 64"),
    ],
)
def test_a_wrong_value_is_refused_without_a_traceback(
    checkpoint: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [] if {"--prompts-file", "--prompt"} & set(arguments) else ["--prompt", "x"]
    assert main(["generate", str(checkpoint), *source, *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("coppice generate: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command", "trace"],
        ["generate"],
        ["generate", "x", "--no-such-option"],
        ["generate", "x", "--max-tok", "5"],
        ["generate", "x", "--max-tokens", "many"],
        ["generate", "x", "--prompt", "a", "--prompts-file", "b"],
        ["serve", "x", "--port", "http"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: coppice" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "report", "demo", "replay"])
@pytest.mark.parametrize("unknown", ["--no-such-option", "--no-such-option=5"])
def test_an_unknown_argument_is_answered_with_the_usage_of_its_command(
    command: str, unknown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, *(["x"] if command != "demo" else []), unknown])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: coppice {command} [-h]")
    assert error.endswith(f"coppice {command}: error: unrecognized arguments: {unknown}\n")


def test_one_argument_too_many_and_an_unknown_option_before_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "twice"])
    assert capsys.readouterr().err.startswith("usage: coppice demo [-h]")
    with pytest.raises(SystemExit):
        main(["--no-such-option", "demo"])
    assert capsys.readouterr().err.startswith("usage: coppice [-h]")


def test_an_option_of_serve_alone_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "demo", "--lora-modules", "a=b", "--port=8000", "--nonsense"])
    assert (
        "unrecognized arguments: --lora-modules a=b --port=8000 --nonsense; --lora-modules, "
        "--port: of coppice serve, not of coppice generate" in capsys.readouterr().err
    )


def test_an_adapter_answers(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_adapter(tmp_path / "french", load(checkpoint))
    words = ["--max-tokens", "6", "--temperature", "0", "--kv-cache-tokens", "512", "--ignore-eos"]
    texts = []
    for lora in ([], ["--lora", str(folder)]):
        assert main(["generate", str(checkpoint), "--prompt", "The key", *words, *lora]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]
    llm = LLM(str(checkpoint), kv_cache_tokens=512, enable_lora=True)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    asked = LoRARequest("other", 2, str(folder))
    (output,) = llm.generate("The key", params, use_tqdm=False, lora_request=asked)
    assert texts[1] == output.outputs[0].text + "\n"
    llm.shutdown()
    assert main(["generate", str(checkpoint), "--prompt", "a", "--lora", str(tmp_path)]) == 2
    assert "has no adapter_config.json" in capsys.readouterr().err
    assert main(["chat", "http://localhost:1", "--lora", "a"]) == 2
    assert "a server's adapter is asked for as a model, with --model" in capsys.readouterr().err


def test_no_prompt_at_all(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n \n"))
    assert main(["generate", str(checkpoint)]) == 2
    assert "there is none in standard input" in capsys.readouterr().err


def test_no_such_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", str(tmp_path / "nothing"), "--prompt", "x"]) == 2
    assert "model" in capsys.readouterr().err
    assert main(["serve", "demo", "--port", "70000"]) == 2
    assert "port must be from 0 to 65535, got 70000" in capsys.readouterr().err


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["serve", "--port", "0"]])
def test_too_little_memory_is_said_without_a_traceback(
    command: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, and in the one that the server starts."""
    name, *more = command
    assert main([name, str(checkpoint), "--kv-cache-tokens", "1000000000000", *more]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"coppice {name}: error: too little memory: the 1,000,000,000,000")
    assert "are missing. Give a kv_cache_tokens of at most" in said


@pytest.mark.usefixtures("own_process")
def test_an_engine_that_is_killed_while_it_loads_is_no_traceback(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system does when memory runs out."""
    started = EngineProcess.__init__

    def killed(self: EngineProcess, *args: Any, **kwargs: Any) -> None:
        started(self, *args, **kwargs)
        self.kill()

    monkeypatch.setattr(EngineProcess, "__init__", killed)
    assert main(["serve", str(checkpoint), "--port", "0"]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == (
        "coppice serve: the engine died: it was killed by SIGKILL, as the system does when memory "
        "runs out"
    )


def test_every_engine_option_is_an_option_of_the_command() -> None:
    parser = CommandParser()
    add_engine_options(parser)
    text = parser.format_help()
    for option in fields(EngineConfig):
        if option.name != "model":
            assert f"--{option.name.replace('_', '-')}" in text
    assert EngineConfig(model="m", **engine_options(parser.parse_args([]))) == EngineConfig(
        model="m"
    )
    given: dict[str, Any] = {
        "page_size": 4,
        "kv_cache_memory_fraction": 0.5,
        "quantization": "int8",
        "enable_prefix_caching": False,
    }
    words = "--page-size 4 --kv-cache-memory-fraction 0.5 --quantization int8"
    chosen = engine_options(parser.parse_args([*words.split(), "--no-enable-prefix-caching"]))
    assert EngineConfig(model="m", **chosen) == EngineConfig(model="m", **given)


def test_help_needs_no_model_and_no_torch() -> None:
    code = (
        "import sys\n"
        "from coppice.frontend.commands.main import main\n"
        "try:\n    main(['generate', '--help'])\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "--temperature" in ran.stdout
    assert {
        "generate",
        "chat",
        "serve",
        "report",
        "cache",
        "demo",
        "replay",
        "simulate",
        "bench",
        "plan",
        "models",
    } == set(commands(build_parser()))


def commands(parser: argparse.ArgumentParser) -> list[str]:
    (found,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return list(found.choices)


def test_the_installed_command_writes_plain_text_to_a_pipe(
    checkpoint: Path, expected: dict[str, str]
) -> None:
    prompt = "The key is"
    ran = subprocess.run(
        [COPPICE, "generate", checkpoint, "--max-tokens", "8", "--report", *SMALL, *GREEDY],
        input=prompt,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(expected[prompt] + "\n")
    assert "\x1b" not in ran.stdout
    assert not ran.stderr


# The tests of faults send the other signal to a server under load.
@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_serve_prints_its_url_and_stops_in_order(checkpoint: Path, signum: int) -> None:
    """A signal while a request runs: the request is answered, then the server ends with 0."""
    command = [COPPICE, "serve", checkpoint, "--port", "0", *SMALL]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert server.stdout is not None
        greeting = dict(server.stdout.readline().split(maxsplit=1) for _ in range(5))
        assert greeting["model"].strip() == str(checkpoint)
        assert "tokens" in greeting["memory"]
        assert greeting["default"].startswith("temperature 1,")
        url = greeting["url"].strip()
        assert greeting["try"].startswith(f"curl {url}/v1/chat/completions ")
        body = {"model": str(checkpoint), "prompt": "The key", "max_tokens": 400, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            first = response.readline()
            if (maps := Path(f"/proc/{server.pid}/maps")).exists():  # the engine's process has it
                assert "libtorch" not in maps.read_text()
            server.send_signal(signum)
            rest = response.read()
        assert first.startswith(b"data: ")
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in rest
        out, err = server.communicate(timeout=30)
        assert server.returncode == 0, err
        assert "stopping" in out
        # First come a processor's instructions, and that the tree is not compiled where it is not.
        (line,) = (
            each
            for each in err.splitlines()
            if " info processor: " not in each and "compiled" not in each
        )
        assert " info request " in line
        assert " status=200 " in line
    finally:
        server.kill()
        server.wait()


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """The command fails before any model is loaded."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "no-such-model", "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
