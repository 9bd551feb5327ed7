"""The process that fills chat templates of requests: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

from coppice.runtime.startup.light_transformers import leave_out_torch


def filled(limits: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
    """The text of one conversation, or the error and its kind."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (text,), _ = render_jinja_template(
            conversations=[question["messages"]],
            tools=question["tools"],
            chat_template=question["chat_template"],
            add_generation_prompt=question["add_generation_prompt"],
            continue_final_message=question["continue_final_message"],
            **question["variables"],
        )
    except MemoryError as error:
        said = f"it takes more than {limits['memory'] >> 20} MiB"
        return {"error": said, "kind": type(error).__name__}
    except Exception as error:  # a template is a program and may raise anything
        return {"error": f"{error!s:.400}", "kind": type(error).__name__}
    if len(text) > limits["characters"]:
        said = f"its text has {len(text)} characters, more than {limits['characters']}"
        return {"error": said, "kind": "ValueError"}
    return {"error": None, "text": text}


def _serve(limits: dict[str, Any]) -> None:
    question: dict[str, Any] = {
        "messages": [{"role": "user", "content": ""}], "tools": None, "chat_template": "",
        "add_generation_prompt": False, "continue_final_message": False, "variables": {},
    }  # fmt: skip
    answer = filled(limits, question)  # imports what is needed
    most = _address_space() + limits["memory"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _answer(answer)
    for line in sys.stdin.buffer:
        # The server ends the process in time; this does so where there is no server any more.
        signal.setitimer(signal.ITIMER_REAL, 2 * limits["seconds"])
        _answer(filled(limits, json.loads(line)))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def _address_space() -> int:
    """That the process has, in bytes."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no Linux
        return 1 << 30


if __name__ == "__main__":
    leave_out_torch()
    _serve(json.loads(sys.argv[1]))
