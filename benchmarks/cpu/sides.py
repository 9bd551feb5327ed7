"""The sides of `cpu_peers.py`: which there are, and the process that runs one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cpu.workloads import Job

_HERE = Path(__file__).parent
_BOTH = ("float32", "int8")
_ALL = ("float32", "bfloat16", "int8")
_SMALL = ("float32", "int8", "int4")
_FLOATS = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Kind:
    """A side: its worker's script, the peer whose environment runs it, precisions, settings."""

    script: str
    peer: str
    precisions: tuple[str, ...] = _BOTH
    variant: dict[str, Any] = field(default_factory=dict)
    converts: bool = True  # whether it needs the checkpoint in its own format


#: All sides by name, Coppice first. Several sides of one peer differ in settings.
KINDS = {
    "coppice": Kind("on_coppice.py", "coppice", (*_ALL, "int4"), converts=False),
    "transformers": Kind("on_transformers.py", "transformers", _FLOATS, converts=False),
    "transformers-cb": Kind(
        "on_transformers.py", "transformers", _FLOATS, {"continuous": True}, False
    ),
    "llama.cpp-1": Kind("on_llamacpp.py", "llama.cpp", _SMALL, variant={"slots": 1}),
    "llama.cpp-32": Kind("on_llamacpp.py", "llama.cpp", _SMALL, variant={"slots": 32}),
    "openvino": Kind("on_openvino.py", "openvino"),
    "ctranslate2": Kind("on_ctranslate2.py", "ctranslate2"),
    "vllm": Kind("on_vllm.py", "vllm", _ALL),
    "vllm-eager": Kind("on_vllm.py", "vllm", _ALL, variant={"eager": True}),
}
PEERS = tuple(dict.fromkeys(kind.peer for kind in KINDS.values() if kind.peer != "coppice"))


class Failed(Exception):
    """A side failed, or did not answer in time."""


class Unsupported(Failed):
    """A side lacks the feature."""


class Side:
    """A worker process, as a context manager: at its end all processes that it started end."""

    def __init__(
        self, kind: Kind, python: str, options: dict[str, Any], log: Path, limit: float
    ) -> None:
        self._options = {**options, "variant": kind.variant}
        self._limit = limit
        environment = dict(os.environ)
        if kind.peer != "coppice":
            # With this repository on the path, its folder `kernels` would hide Hugging Face's.
            environment.pop("PYTHONPATH", None)
        environment["HF_HUB_OFFLINE"] = "1"
        log.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.perf_counter()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, str(_HERE / kind.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the process some seconds to end, then kills its group of processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def prepare(self) -> None:
        self._ask({"do": "prepare", "options": self._options})

    def start(self) -> str:
        """Loads the model; returns the version of the engine."""
        return str(self._ask({"do": "start", "options": self._options})["version"])

    def run(self, jobs: Sequence[Job], fresh: bool) -> dict[str, Any]:
        """The worker's answer, and `memory`: the most resident bytes of its processes."""
        for pid in self._pids():
            # Resets the peak resident memory (see proc(5)).
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        answer = self._ask({"do": "run", "jobs": [asdict(job) for job in jobs], "fresh": fresh})
        answer["memory"] = sum(_peak_bytes(pid) for pid in self._pids())
        return answer

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        late = threading.Timer(self._limit, self._kill)
        late.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            was_late = not late.is_alive()
            late.cancel()
        if not line:
            why = f"took more than {self._limit:.0f} s" if was_late else "its process ended"
            raise Failed(f"{message['do']}: {why}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise (Unsupported if answer.get("unsupported") else Failed)(answer["error"])
        return answer

    def _pids(self) -> list[int]:
        """The worker and all its descendants."""
        children: dict[int, list[int]] = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rsplit(")", 1)[1].split()
            except OSError:  # it has ended
                continue
            children.setdefault(int(fields[1]), []).append(int(status.parent.name))
        found = [self._process.pid]
        for pid in found:
            found += children.get(pid, [])
        return found


def _peak_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
