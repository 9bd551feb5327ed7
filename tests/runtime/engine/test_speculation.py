"""With drafts each request gets what it gets without, and what is rejected leaves no trace.

COPPICE_SCHEDULES=20000 runs that many random schedules, as in `test_random_schedules`.
"""

from __future__ import annotations

import os

import pytest
from fake_model import WrongKV, fake_checkpoint
from random_schedules import RandomSchedule

from coppice.runtime.schedule.queue import SCHEDULING_POLICIES

_SCHEDULES = int(os.environ.get("COPPICE_SCHEDULES", "24"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fake_checkpoint(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def alone(checkpoint):
    return RandomSchedule.alone_engine(checkpoint)


@pytest.mark.parametrize(
    ("begin", "end"), [(0, _SCHEDULES), pytest.param(200_000, 200_900, marks=pytest.mark.slow)]
)
def test_random_schedules_with_drafts_give_what_each_request_gives_alone(
    checkpoint, alone, begin, end
):
    compared = accepted = rejected = branched = 0
    for seed in range(begin, end):
        policy = SCHEDULING_POLICIES[seed % len(SCHEDULING_POLICIES)]
        try:
            schedule = RandomSchedule(seed, checkpoint, policy, known=alone)
            schedule.run()
            compared += schedule.compare_with_each_alone(alone)
        except (Exception, WrongKV) as error:
            error.add_note(f"RandomSchedule({seed}, checkpoint, {policy!r}, known=alone)")
            raise
        drafts = schedule.drafts
        accepted += drafts.accepted
        rejected += drafts.drafted - drafts.accepted
        branched += drafts.branched
    assert compared and accepted and rejected and branched, "the schedules were too easy"
