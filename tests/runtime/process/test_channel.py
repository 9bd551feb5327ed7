"""What a channel does with objects that can't be sent."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest

from coppice.runtime.process.channel import Channel


def test_what_can_not_be_pickled_is_left_out_and_the_rest_arrives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = Pipe()
    channel = Channel(ours)
    other = Channel(theirs)
    for item in ("first", lambda: None, "second"):
        channel.send(item)
    received: list[object] = []
    while len(received) < 2:
        received += other.receive()
    channel.send("third")
    assert [*received, *other.receive()] == ["first", "second", "third"]
    assert "can't be sent" in caplog.text
    channel.close()
    other.close()
