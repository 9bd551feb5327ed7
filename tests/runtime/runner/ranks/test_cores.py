"""Which cores ranks get on a machine with several NUMA nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coppice.runtime.runner.ranks import cores
from coppice.runtime.runner.ranks.cores import divided_cores


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 16 cores, two threads each, as Linux numbers them: nodes have 0-3 and 8-11, 4-7
    and 12-15. It has a node of memory alone, too."""
    for name, listed in (("node0", "0-3,8-11"), ("node1", "4-7,12-15"), ("node2", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(listed + "\n", encoding="ascii")
    monkeypatch.setattr(cores, "_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return tmp_path


@pytest.mark.usefixtures("two_nodes")
def test_a_rank_has_cores_of_one_node() -> None:
    nodes = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert divided_cores(2) == nodes
    assert divided_cores(4) == [part for node in nodes for part in (node[:4], node[4:])]


@pytest.mark.usefixtures("two_nodes")
def test_no_core_is_left_or_has_two_ranks() -> None:
    found = divided_cores(3)
    assert found is not None
    assert sorted(core for own in found for core in own) == list(range(16))
    assert {len(own) for own in found} == {5, 6}


def test_only_cores_that_the_process_may_use_are_divided(
    two_nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 6, 9, 13})
    assert divided_cores(2) == [[1, 9], [6, 13]]
    assert divided_cores(4) == [[1], [9], [6], [13]]
    assert divided_cores(5) is None, "fewer cores than ranks: they share them all"
    assert divided_cores(1) is None, "nothing is divided"


def test_a_core_whose_node_is_unknown_is_divided_as_well(two_nodes: Path) -> None:
    (two_nodes / "node1" / "cpulist").unlink()
    assert divided_cores(2) == [list(range(8)), list(range(8, 16))]
