"""Drafts for the sequences that decode in a step, where budget and free pages have room."""

from __future__ import annotations

from coppice.runtime.sampling.drafts.draft import MOST_DRAFTED, Speculation
from coppice.runtime.schedule.chunks import Schedule
from coppice.runtime.schedule.paging import Paging


def add_drafts(
    schedule: Schedule,
    speculation: Speculation,
    paging: Paging,
    most_rows: int,
    *,
    branches: bool,
) -> None:
    """Adds what `speculation` proposes to a schedule, and takes the pages for it.

    Args:
        schedule: all else of the step; no token of its sequences is late.
        speculation: is asked for all sequences that decode, but for beams.
        paging: has the free pages.
        most_rows: tokens that the step may have, drafted ones included.
        branches: whether a draft may have branches; else its likeliest path is taken.
    """
    decoding = [
        chunk
        for chunk in schedule.chunks
        if chunk.decode and not chunk.sequence.request.beam_search
    ]
    if not decoding:
        return
    if speculation.skips(len(decoding)):
        schedule.asked = len(decoding)
        return
    rows = schedule.rows()
    budget = most_rows - rows
    chunks, asked = [], []
    for chunk in decoding:
        sequence = chunk.sequence
        most = min(
            budget,
            MOST_DRAFTED,
            # The last token needs no row.
            sequence.request.max_length - len(sequence.tokens) - 1,
            paging.room_for_drafts(sequence),
        )
        if most > 0:
            chunks.append(chunk)
            asked.append((sequence, most))
    if not asked:
        return
    schedule.asked = len(asked)
    drafts = speculation.propose(asked, rows - len(asked))
    for chunk, (sequence, most), draft in zip(chunks, asked, drafts, strict=True):
        if not draft:
            continue
        if not (branches or draft.is_chain):
            draft = draft.likeliest()
        count = paging.grow_for_draft(sequence, min(len(draft), most, budget))
        if count > 0:
            chunk.draft = draft.first(count)
            budget -= count
            schedule.drafted += count
