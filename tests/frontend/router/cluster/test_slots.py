"""Replicas that are given one disk cache have sub-folders of their own, and find them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from coppice.frontend.router.cluster.slots import Slot
from coppice.runtime.tiers.disk.folder import FolderLock, content
from tests.frontend.router.cluster.processes import Cluster
from tests.frontend.router.cluster.traffic import TEXT, complete, report


def test_replicas_take_the_first_folder_that_is_free(tmp_path: Path) -> None:
    there = tmp_path / "made" / "cache"
    first, second = Slot.of(str(there)), Slot.of(str(there))
    assert [first.folder, second.folder] == [there / "replica-0", there / "replica-1"]
    (first.folder / "kept").touch()
    first.release()
    first.release()
    again = Slot.of(str(there))
    assert (again.folder / "kept").exists()
    assert Slot.of(str(there)).folder == there / "replica-2"


def test_a_folder_that_an_engine_still_has_is_left_alone(tmp_path: Path) -> None:
    """Its replica was killed, and it has not taken notice yet."""
    slot = Slot.of(str(tmp_path))
    content(slot.folder).mkdir()
    engine = FolderLock(content(slot.folder))
    slot.release()
    assert Slot.of(str(tmp_path)).folder == tmp_path / "replica-1"
    engine.release()
    assert Slot.of(str(tmp_path)).folder == tmp_path / "replica-0"


def test_a_folder_that_can_not_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"disk_cache: '.*/file' can't be used: "):
        Slot.of(str(tmp_path / "file"))


@pytest.mark.slow
async def test_replicas_find_again_what_they_had_on_the_disk(
    cluster: Callable[..., Cluster], session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    options = ("--replicas", "2", "--disk-cache", str(tmp_path), "--disk-cache-size", "64MiB")
    running = cluster(*options)
    texts = [f"{number} {TEXT}" for number in range(12)]
    answers = [await complete(session, running.url, text) for text in texts]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replica-0", "replica-1"]
    running.stop()
    running = cluster(*options)
    assert [await complete(session, running.url, text) for text in texts] == answers
    told = await report(session, running.url)
    assert told["counts"]["since_start"]["loaded_tokens"]["disk"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replica-0", "replica-1"]
    running.stop()
