"""`coppice cache`: what a folder has is listed, counted, verified and tidied."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_pages import PAGE_BYTES, line, numbered, put, right

from coppice.frontend.commands.main import main
from coppice.runtime.tiers.disk.folder import content
from coppice.runtime.tiers.disk.store import DiskStore

STEM = [7, 1, 2, 3, 4, 5, 6, 7]
LEFT, RIGHT = line(*STEM, 20, 21), line(*STEM, 30, 31, 32, 33, 34)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A stem of two pages that two prompts share, of which one was used twice; one more prompt."""
    store = DiskStore(tmp_path, 2**20, PAGE_BYTES)
    assert put(store, [*LEFT, *RIGHT[2:], *numbered(1)]) == 6
    store.close()
    for _ in range(2):
        store = DiskStore(tmp_path, 2**20, PAGE_BYTES)
        assert all(right(store, LEFT))
        store.close()
    return tmp_path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> Any:
    assert main(["cache", *map(str, arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_prefixes_are_listed_as_the_tree_branches(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = run_json(capsys, "ls", folder)
    assert listed["count"] == 4
    stem, left, right_, other = sorted(
        listed["prefixes"], key=lambda each: (-each["hits"], each["after"], -each["tokens"])
    )
    assert (stem["length"], stem["pages"], stem["next"], stem["starts"]) == (8, 2, 2, STEM[:4])
    assert (stem["hits"], left["hits"], right_["hits"], other["hits"]) == (2, 2, 0, 0)
    assert (left["length"], left["tokens"], left["starts"]) == (10, 2, [20, 21])
    sizes = {(each["length"], each["tokens"], each["size"]) for each in (right_, other)}
    assert sizes == {(13, 5, 2 * PAGE_BYTES), (4, 4, PAGE_BYTES)}
    assert main(["cache", "ls", str(folder), "--limit", "1"]) == 0
    text = capsys.readouterr().out
    assert "7 1 2 3" in text and "1 of 4 prefixes" in text


def test_figures_while_a_server_has_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "v0").mkdir()
    (folder / "v0" / "old").write_bytes(b"x" * 3000)
    store = DiskStore(folder, 2**20, PAGE_BYTES)
    found = run_json(capsys, "stat", folder)
    assert (found["pages"], found["tokens"], found["size"], found["hits"]) == (
        6, 19, 6 * PAGE_BYTES, 6,
    )  # fmt: skip
    assert found["owner"] == str(os.getpid())
    assert found["older"] == {"v0": 3000}
    assert found["models"] == [{"size": PAGE_BYTES, "pages": 6, "tokens": 19, "hits": 6}]
    assert main(["cache", "gc", str(folder)]) == 1
    assert f"in use by process {os.getpid()}" in capsys.readouterr().err
    store.close()
    assert main(["cache", "stat", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "6 pages with 19 tokens: 5.9 KiB, 6 hits" in text
    assert "left by an older version: v0, 2.9 KiB" in text
    assert run_json(capsys, "gc", folder)["older"] == 1
    assert not (folder / "v0").exists()


def test_a_damaged_page_is_found_and_removed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_json(capsys, "verify", folder) == {"pages": 6, "damaged": []}
    [file] = [path for path in content(folder).glob("*.kv") if path.stat().st_size]
    data = bytearray(file.read_bytes())
    data[500] ^= 1
    file.write_bytes(data)
    found = run_json(capsys, "verify", folder, status=1)
    assert found["pages"] == 6
    assert found["damaged"] == [
        {"file": file.name, "offset": 0, "tokens": 4, "size": PAGE_BYTES, "missing": False}
    ]
    assert main(["cache", "verify", str(folder)]) == 1
    assert f"{file.name} at 0: 4 tokens, damaged\n6 pages, 1 damaged" in capsys.readouterr().out
    done = run_json(capsys, "gc", folder, "--verify")
    assert (done["damaged"], done["pages"], done["segments"]) == (1, 0, 0)
    assert run_json(capsys, "verify", folder) == {"pages": 5, "damaged": []}
    store = DiskStore(folder, 2**20, PAGE_BYTES)
    assert right(store, [*LEFT, *RIGHT[2:], *numbered(1)]) == [False, *[True] * 5]
    store.close()


def test_tidying_keeps_what_was_used_as_far_as_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = DiskStore(tmp_path, 16 * 16 * 1100, PAGE_BYTES)
    keys = numbered(200)
    for begin in range(0, 200, 10):
        put(store, keys[begin : begin + 10])
    used = keys[2:5]
    assert all(right(store, used))
    store.close()
    size = sum(path.stat().st_size for path in content(tmp_path).glob("*.kv"))
    done = run_json(capsys, "gc", tmp_path, "--max-size", size // 2)
    left = sum(path.stat().st_size for path in content(tmp_path).glob("*.kv"))
    assert left <= size // 2
    assert done["freed"] > 0.9 * (size - left) and done["pages"] > 80
    store = DiskStore(tmp_path, 16 * 16 * 1100, PAGE_BYTES)
    there = right(store, keys)
    assert all(there[2:5]) and not any(there[5:50]) and all(there[150:])
    assert sum(there) == 200 - done["pages"]
    store.close()


def test_wrong_folders_and_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in ("ls", "stat", "verify", "gc"):
        assert main(["cache", action, str(tmp_path)]) == 2
        assert "DIR must be the folder of a disk_cache, got" in capsys.readouterr().err
    DiskStore(tmp_path, 2**20, PAGE_BYTES).close()
    assert main(["cache", "ls", str(tmp_path), "--limit", "0"]) == 2
    assert "--limit must be at least 1, got 0" in capsys.readouterr().err
    assert main(["cache", "gc", str(tmp_path), "--max-size", "much"]) == 2
    assert "--max-size must be a size such as 64GiB" in capsys.readouterr().err
    assert run_json(capsys, "ls", tmp_path) == {"prefixes": [], "count": 0}
    (content(tmp_path) / "index.sqlite").write_bytes(np.arange(5000, dtype=np.int32).tobytes())
    assert main(["cache", "stat", str(tmp_path)]) == 1
    assert "can't be read: " in capsys.readouterr().err
