"""The worker's end of the CPU yardstick's pipe: JSON lines in, one JSON line back for each.

A worker is a script that a peer's own interpreter runs, so this needs the standard library only.
The messages, `do` first::

    prepare  options                    convert the checkpoint into the peer's own format
    start    options                    load it -> version
    run      jobs, fresh                answer these jobs -> seconds, first, tokens

`options` has `checkpoint` (folder), `folder` (for converted files), `precision` ("float32" or
"int8"), `variant` (the side's own settings), `threads`, `length` (tokens of the longest sequence),
`lines` (most sequences at a time), `tokens_shared` and `tokens_separate` (of KV, with each shared
prefix once or for every sequence). `fresh` says that what is cached belongs to earlier rounds.
`first` are the seconds to the first token of each job, or null if the peer does not tell.
`tokens[i]` are the lines of job i, each without its prompt. An answer has `error` instead if
something went wrong, with `unsupported` if the peer can't do it at all.
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
    """The peer has no such thing."""


class Peer:
    """What a worker defines: how to convert, to load and to run."""

    version = ""

    @staticmethod
    def prepare(options: dict[str, Any]) -> None:
        """Convert the checkpoint into `options["folder"]`, if the peer needs that."""

    def __init__(self, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def run(self, jobs: list[Job], fresh: bool) -> dict[str, Any]:
        """Answer the jobs, all submitted at once: `seconds`, `first`, `tokens`."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends processes that the worker started."""


def serve(peer: type[Peer]) -> None:
    """Answer messages until the pipe is closed."""
    # Libraries print to standard output: what is the pipe here becomes standard error there.
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
