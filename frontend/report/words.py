"""Names of causes, sentences, times, counts and excerpts of text, as all reports write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from coppice.runtime.report.snapshot import (
    CAUSES,
    Counts,
    EngineStats,
    TiersReport,
    WindowReport,
)
from coppice.runtime.tiers.sizes import size_text

if TYPE_CHECKING:
    from coppice.frontend.text.tokenizer import Tokenizer

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids to text that people read."""

Report: TypeAlias = Mapping[str, Any]
"""A report as JSON, or a part of one (see `coppice.frontend.report.encode`)."""

CAUSE_NAMES = {
    "cold": "cold",
    "evicted": "evicted",
    "diverged": "diverged",
    "namespace": "namespace",
    "in_flight": "in flight",
    "other_replica": "elsewhere",
    "last_token": "last token",
    "prompt_logprobs": "logprobs",
    "not_loaded": "not loaded",
    "no_cache": "no cache",
}
CAUSE_MEANINGS = {
    "cold": "never seen before",
    "evicted": "was cached, and was evicted",
    "diverged": "known text after another beginning",
    "namespace": "known in another namespace only",
    "in_flight": "another request was computing it",
    "other_replica": "cached on another replica",
    "last_token": "needed for its logits",
    "prompt_logprobs": "computed again for prompt logprobs",
    "not_loaded": "a tier had it; computing was faster",
    "no_cache": "prefix caching is off",
}
assert set(CAUSE_NAMES) == set(CAUSE_MEANINGS) == set(CAUSES)

_LEAST_SHARE = 0.01  # of the tokens that all prefixes saved; those that saved less get no row
_END_CHARACTERS = 20  # of a prefix's text at either end, so that its row fits 80 columns
_SHOWN_IDS = 3  # at either end, if there is no text


def cause_meaning(cause: str, counts: Counts) -> str:
    """What a cause means; for evicted tokens also how long they had been idle."""
    meaning = CAUSE_MEANINGS[cause]
    if cause == "evicted" and counts.evicted_idle_seconds:
        meaning = f"was cached; idle for {duration(counts.evicted_idle_seconds)}"
    return meaning


def drafts_sentence(stats: EngineStats) -> str:
    """What drafts came to."""
    drafted, accepted = sum(stats.drafted_tokens.values()), sum(stats.accepted_tokens.values())
    parts = [f"{count:,} from {name}" for name, count in stats.accepted_tokens.items()]
    of = f" ({', '.join(parts)})" if parts else ""
    model = ""
    if stats.draft_model_tokens:
        model = (
            f"; the draft model had {stats.draft_model_tokens['hit']:,} tokens in its tree and "
            f"took {stats.draft_model_seconds:,.1f} s"
        )
    saved = sum(stats.draft_seconds_saved.values())
    came = f"saved {saved:z,.1f} s" if saved > -0.05 else f"cost {-saved:,.1f} s more than it saved"
    return (
        f"{accepted:,} of {drafted:,} drafted tokens were accepted{of}: "
        f"{stats.tokens_a_step:.2f} tokens a step, which {came}{model}"
    )


def estimate_sentence(counts: Counts) -> str | None:
    """How many causes were estimated from a sample, and how well; None if all are exact."""
    if not counts.estimated_tokens:
        return None
    return (
        f"Requests came fast: the causes of {counts.estimated_tokens:,} of "
        f"{counts.prompt_tokens:,} prompt tokens are estimated from a sample, "
        "with a standard error of up to "
        f"{counts.standard_error:.2%} of the prompt tokens."
    )


def tiers_sentence(tiers: TiersReport) -> str:
    """What came back from tiers beyond the pool."""
    parts = [f"{each.loaded_tokens:,} from {each.name}" for each in tiers.stores]
    said = (
        f"{tiers.loaded_tokens:,} prompt tokens were loaded instead of computed "
        f"({', '.join(parts)}), which saved {tiers.saved_seconds:,.1f} s"
    )
    if tiers.computed_instead:
        said += f"; {tiers.computed_instead:,} more were computed, which was faster"
    if warmed := sum(each.warmed_tokens for each in tiers.stores):
        said += f"; the {warmed:,} hottest tokens came back before anybody asked for them"
    if tiers.waiting_bytes:
        said += f"; {size_text(tiers.waiting_bytes)} wait to be stored"
    if tiers.unwritten_pages:
        said += (
            f"; {tiers.unwritten_pages:,} pages left without being kept, since tiers did not take "
            "them fast enough"
        )
    return said


def tier_row_name(row: Report, token_bytes: int | None) -> str:
    """The tiers of a row of tier sizes in words."""
    names = []
    for tier in row["tiers"]:
        kept = tier["kept_tokens"] if tier["tokens"] is None else tier["tokens"]
        size = size_text(kept * token_bytes) if token_bytes else short_count(kept)
        limit = "unlimited, " if tier["tokens"] is None else ""
        names.append(f"{tier['name']} {limit}{size}")
    return " + ".join(names) or "no tier"


def windows_sentence(report: WindowReport) -> str:
    """What sliding windows saved, and what freeing older keys would."""
    layers = sum(layers for _, layers in report.windows)
    sizes = " and ".join(f"{size:,}" for size, _ in report.windows)
    keys = report.keys_read + report.keys_skipped
    share = report.keys_skipped / keys if keys else 0.0
    return (
        f"{layers} of {report.layers} layers see the last {sizes} tokens alone: they did not read "
        f"{share:.1%} of their sequences' keys. Running sequences keep {report.pages_old:,.1f} "
        f"pages' worth of keys that are older, for prompts that begin alike"
    )


def adapter_lines(adapters: Sequence[Report]) -> str | None:
    """A line for each of the adapters with the most prompt tokens; None without adapters."""
    lines = ["Adapters"]
    for each in sorted(adapters, key=lambda each: -each["prompt_tokens"])[:6]:
        prompt, hit = each["prompt_tokens"], each["hit_tokens"]
        line = f"{one_line(each['name'])}: {each['requests']:,} requests, "
        line += f"{hit / prompt if prompt else 0:.1%} of {prompt:,} prompt tokens hit"
        if each["invoked"]:
            line += f", {each['base_hit_tokens']:,} of them from the base model's cache"
        lines.append(line)
    return "\n".join(lines) if adapters else None


def ordered_causes(counts: Report) -> list[tuple[str, int]]:
    """The causes of a report's counts that cost tokens, the costliest first."""
    found = [(cause, tokens) for cause, tokens in counts["causes"].items() if tokens]
    return sorted(found, key=lambda each: -each[1])


def worth_showing(prefixes: Sequence[Report]) -> list[Report]:
    """The prefixes of a report that saved at least 1 % of the tokens that all of them saved."""
    least = _LEAST_SHARE * sum(prefix["tokens_saved"] for prefix in prefixes)
    return [prefix for prefix in prefixes if prefix["tokens_saved"] >= least]


def excerpt(prefix: Report) -> str:
    """The text of a report's prefix on one line, without its middle if it is long.

    The end is shown too, since prefixes of one conversation begin alike.
    """
    first, last = prefix["first"], prefix["last"]
    start, end = shown_text(first), shown_text(last or first)
    if last is None or first["tokens"] + last["tokens"] == prefix["tokens"]:
        whole = start + end if last else start
        if len(whole) <= 2 * _END_CHARACTERS + 3:
            return whole
    return f"{_shortened(start, False)} … {_shortened(end, True)}"


def _shortened(text: str, end: bool) -> str:
    """The first or last characters of a text; of token ids, whole ones."""
    cut = text[-_END_CHARACTERS:] if end else text[:_END_CHARACTERS]
    numbers = not text.strip("0123456789 …")
    if numbers and len(text) > len(cut) and " " in cut:
        before, last = text[-_END_CHARACTERS - 1], text[_END_CHARACTERS]
        if end and before != " ":
            cut = cut.split(" ", 1)[1]
        elif not end and last != " ":
            cut = cut.rsplit(" ", 1)[0]
    return cut.lstrip() if end else cut.rstrip()


def shown_text(piece: Report) -> str:
    """The text of a report's piece on one line, or its hash if texts are hidden."""
    return f"#{piece['hash']}" if piece["text"] is None else one_line(piece["text"])


def one_line(text: str) -> str:
    """Text with line breaks and other unprintable characters made visible."""
    return "".join(
        "↵" if character == "\n" else character if character.isprintable() else "·"
        for character in text.replace("\r\n", "\n").replace("\n\n", "\n")
    )


def duration(seconds: float, units: int = 2) -> str:
    """A time for people: its one or two largest units; below a minute, tenths of a second."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    left, parts = round(seconds), []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
        if parts and (len(parts) == units or not count):
            break
    return " ".join(parts)


def short_count(number: float) -> str:
    """A count with three digits and a unit: 950, 12.5k, 3M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{_three_digits(number / size)}{unit}"
    return _three_digits(number)


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def token_text(tokenizer: Tokenizer | None) -> Decode:
    """A function from token ids to text that people read.

    Special tokens stay visible. Ids outside the tokenizer's vocabulary are counted: a replay uses
    such ids if the trace has only the length of an output. Without a tokenizer the ids are shown as
    numbers, at most three at either end, with the number of those between.
    """
    if tokenizer is None:
        return _numbers
    size = tokenizer.vocabulary

    def decode(token_ids: Sequence[int]) -> str:
        parts = []
        for known, run in groupby(token_ids, key=lambda token: token < size):
            ids = list(run)
            if known:
                parts.append(tokenizer.decode(ids, skip_special_tokens=False))
            else:
                parts.append(f"⟨{len(ids)} token{'s' * (len(ids) > 1)} without text⟩")
        return "".join(parts)

    return decode


def _numbers(token_ids: Sequence[int]) -> str:
    shown = list(map(str, token_ids))
    if (left := len(shown) - 2 * _SHOWN_IDS) > 1:
        shown[_SHOWN_IDS:-_SHOWN_IDS] = [f"…{left}…"]
    return " ".join(shown)
