"""The worker's end of the pipe to `cpu_peers.py`: JSON lines in, one JSON line back for each.

A worker is a script that a peer's own interpreter runs, so this module needs only the standard
library. The messages, by their key `do`::

    prepare  options                    convert the checkpoint into the peer's own format
    start    options                    load it -> version
    run      jobs, fresh                answer these jobs -> seconds, first, tokens

Keys of `options`:

    checkpoint       folder
    folder           for converted files
    precision        "float32", "bfloat16", "int8" or "int4"
    variant          settings of this side
    threads
    length           tokens of the longest sequence
    lines            the most sequences at a time
    tokens_shared    tokens of KV, each shared prefix counted once
    tokens_separate  tokens of KV, each shared prefix counted for every sequence

`fresh` is true if all that is cached comes from earlier workloads. `first` has the seconds to each
job's first token, or is null if the peer does not report them. `tokens[i]` are the lines of job i
without their prompt. Where `options["variant"]` has the key `drafts`, `steps` are the passes of the
model after a job's first token, for one job at a time. If something fails, the answer has `error`
instead, and `unsupported` if the peer lacks the feature.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from workloads import Job


class Unsupported(Exception):
    """The peer lacks this feature."""


class Peer:
    """What a worker defines: how to convert a checkpoint, load it and answer jobs."""

    version = ""

    @staticmethod
    def prepare(options: dict[str, Any]) -> None:
        """Converts the checkpoint into `options["folder"]`, if the peer needs that."""

    def __init__(self, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def run(self, jobs: list[Job], fresh: bool) -> dict[str, Any]:
        """Answers the jobs, all submitted at once; returns `seconds`, `first` and `tokens`."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends processes that the worker started."""


def serve(peer: type[Peer]) -> None:
    """Answers messages until the pipe is closed."""
    # Standard output is the pipe. Libraries print to it, so for them it becomes standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    running: Peer | None = None
    try:
        for line in sys.stdin:
            message = json.loads(line)
            try:
                answer: dict[str, Any] = {}
                if message["do"] == "prepare":
                    Path(message["options"]["folder"]).mkdir(parents=True, exist_ok=True)
                    peer.prepare(message["options"])
                elif message["do"] == "start":
                    running = peer(message["options"])
                    answer["version"] = running.version
                else:
                    assert running is not None
                    jobs = [Job(**job) for job in message["jobs"]]
                    answer = running.run(jobs, message["fresh"])
            except Exception as error:
                traceback.print_exc()
                unsupported = isinstance(error, Unsupported)
                why = str(error) if unsupported else f"{type(error).__name__}: {error}"
                answer = {"error": why.split("\n")[0][:500], "unsupported": unsupported}
            answers.write(json.dumps(answer) + "\n")
    finally:
        if running is not None:
            running.close()
