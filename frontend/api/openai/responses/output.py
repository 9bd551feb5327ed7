"""The output items of a response, and the events that report how they grow."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from coppice.frontend.api.openai.responses.items import item_id
from coppice.frontend.chat.pieces import CallArguments, CallBegins, Piece, ReasoningPiece
from coppice.frontend.http.ids import fresh_id

Json = dict[str, Any]


_NEW: Json = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
}
_NEW_PART: Json = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}


class Output:
    """Makes items of the pieces of one answer.

    Events have no `sequence_number` yet.

    Attributes:
        items: so far, the last of them perhaps unfinished.
    """

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._open = False  # whether the last item is unfinished

    def push(self, pieces: Iterable[Piece], logprobs: Sequence[Json] = ()) -> list[Json]:
        """The events for the next pieces; `logprobs` are those of their tokens."""
        events: list[Json] = []
        for piece in pieces:
            if isinstance(piece, CallBegins):
                call = {"call_id": f"call_{fresh_id()[:24]}", "name": piece.name, "arguments": ""}
                events += self._begin("function_call", call)
            elif isinstance(piece, CallArguments):
                self.items[-1]["arguments"] += piece.text
                events.append(self._event("function_call_arguments.delta", delta=piece.text))
            elif isinstance(piece, ReasoningPiece):
                events += self._grow("reasoning", piece.text, ())
            else:
                events += self._grow("message", piece.text, logprobs)
                logprobs = ()
        if logprobs:  # of tokens whose text is held back
            events += self._grow("message", "", logprobs)
        return events

    def end(self, status: str) -> list[Json]:
        """The events for the end of an answer that is "completed" or "incomplete"."""
        events = [] if self.items else self._grow("message", "", ())
        return events + self._finish(status)

    def _grow(self, kind: str, text: str, logprobs: Sequence[Json]) -> list[Json]:
        """Adds text to the last item, or to a new one if that is of another type."""
        events = []
        if not (self._open and self.items[-1]["type"] == kind):
            events = self._begin(kind, copy.deepcopy(_NEW[kind]))
            part = copy.deepcopy(_NEW_PART[kind])
            self.items[-1]["content"].append(part)
            events.append(self._part("content_part.added", part))
        (part,) = self.items[-1]["content"]
        part["text"] += text
        more: Json = {"content_index": 0, "delta": text}
        if kind == "message":
            part["logprobs"] += logprobs
            more["logprobs"] = list(logprobs)
        if text or logprobs:
            events.append(self._event(f"{part['type']}.delta", **more))
        return events

    def _begin(self, kind: str, more: Json) -> list[Json]:
        """Ends the last item, and begins one of that type."""
        events = self._finish("completed")
        item = {"id": item_id(kind), "type": kind, "status": "in_progress", **more}
        self.items.append(item)
        self._open = True
        return [*events, self._item("output_item.added")]

    def _finish(self, status: str) -> list[Json]:
        """Ends the last item."""
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("function_call_arguments.done", **done)]
        else:
            (part,) = item["content"]
            done = {"content_index": 0, "text": part["text"]}
            if "logprobs" in part:
                done["logprobs"] = part["logprobs"]
            events = [self._event(f"{part['type']}.done", **done)]
            events.append(self._part("content_part.done", part))
        return [*events, self._item("output_item.done")]

    def _item(self, kind: str) -> Json:
        place = len(self.items) - 1
        item = dict(self.items[-1])  # it may grow before the event is written
        if "content" in item:
            item["content"] = list(map(_copied, item["content"]))
        return {"type": f"response.{kind}", "output_index": place, "item": item}

    def _part(self, kind: str, part: Json) -> Json:
        return self._event(kind, content_index=0, part=_copied(part))

    def _event(self, kind: str, **more: Any) -> Json:
        place = len(self.items) - 1
        named = {"item_id": self.items[-1]["id"], "output_index": place}
        return {"type": f"response.{kind}", **named, **more}


def _copied(part: Json) -> Json:
    """A part as it is now. Its list of logprobs may grow; those that are in it never change."""
    return part | ({"logprobs": list(part["logprobs"])} if "logprobs" in part else {})
