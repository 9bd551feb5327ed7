"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coppice.runtime.planning.cache import window_saving
from coppice.runtime.planning.formats import FORMATS, SEEN_ON
from coppice.runtime.planning.plan import Needs, Plan


def readable(count: int) -> str:
    """A number of bytes for people; whole ones of a unit without a fraction."""
    if count < 1024:
        return f"{count:,} B"
    power = min((count.bit_length() - 1) // 10, 4)
    value = count / 1024**power
    unit = ("KiB", "MiB", "GiB", "TiB")[power - 1]
    return f"{value:,.0f} {unit}" if value.is_integer() else f"{value:,.1f} {unit}"


def show(console: Console, plan: Plan, name: str) -> None:
    """Prints the plan."""
    console.print(Text(f"{name}: {plan.model.architecture}", "bold"), soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in _rows(plan):
        table.add_row(*row)
    console.print(table)
    options = plan.options
    shared = f", the first {options.shared:,} alike" if options.shared else ""
    console.print(
        f"\n{options.users:,} sequences of {plan.context:,} tokens{shared}", soft_wrap=True
    )
    needs = Table(box=None, pad_edge=False)
    needs.add_column("KV kept")
    for title in ("they take", "that fit", "wasted"):
        needs.add_column(title, justify="right")
    needs.add_row(f"{plan.longest:,} tokens reserved for each", *_needs(plan.reserved))
    needs.add_row("in pages", *_needs(plan.paged))
    if options.shared:
        needs.add_row("in pages, the alike shared", *_needs(plan.shared))
    console.print(needs)
    _show_formats(console, plan)
    saving = window_saving(plan.model.sliding_windows, plan.context)
    if saving:
        console.print(f"\n{saving[0].upper()}{saving[1:]}.", soft_wrap=True)
        whole = plan.context * plan.token_bytes
        console.print(
            f"A decoding step reads {readable(whole - plan.window_bytes)} of the "
            f"{readable(whole)} of such a sequence; {plan.window_bytes / plan.page_bytes:,.1f} "
            f"pages' worth is not read.",
            soft_wrap=True,
        )


def _show_formats(console: Console, plan: Plan) -> None:
    console.print(f"\nOn a CPU; costs and speeds as seen on {SEEN_ON}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("number format")
    for title in ("weights", "perplexity", "prefill", "decoding 1", "16"):
        table.add_column(title, justify="right")
    for each in FORMATS:
        more = f"+{each.perplexity_more:.2%}" if each.perplexity_more else ""
        speeds = (f"{rate:.1f}x" for rate in (each.prefill, each.decode_1, each.decode_16))
        table.add_row(each.flags, readable(plan.cpu_formats[each.name]), more, *speeds)
    console.print(table)
    console.print("That model was published in 4 bits: other models lose more in int4.")


def _rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    options, numbers = plan.options, plan.numbers
    active = ""
    if numbers.used != numbers.total:
        active = f"{numbers.used:,} compute for a token"
    yield "parameters", f"{numbers.total:,}", active
    if options.tensor_parallel_size > 1:
        yield "devices", f"{options.tensor_parallel_size:,}", "each has at most what follows"
    kind = plan.dtype if options.quantization is None else options.quantization
    stored = plan.stored
    if stored.name is not None or stored.bytes is not None:
        size = "?" if stored.bytes is None else readable(stored.bytes)
        unpacked = "" if stored.name is None else f"{stored.name}, decoded while it is loaded"
        yield "weights in files", size, unpacked
    yield "weights in memory", readable(plan.weights.total), kind
    if plan.cpu_weights is not None:
        yield (
            "  on a CPU",
            readable(plan.cpu_weights.total),
            f"{stored.on_cpu}, for which it is made",
        )
    yield "KV of a token", readable(plan.token_bytes), f"{plan.token_bytes:,} bytes"
    yield (
        f"KV of a page of {options.page_size}",
        readable(plan.page_bytes),
        f"{plan.page_bytes:,} bytes",
    )
    if plan.draft_weights is not None:
        yield "draft model's weights", readable(plan.draft_weights.total), ""
        yield (
            "  its KV of a token",
            readable(plan.draft_token_bytes),
            "for each token of the model's cache",
        )
    if plan.cache_bytes is not None and plan.pages is not None:
        part = "" if plan.draft_weights is None else "of both models"
        if options.kv_cache_memory is None:
            part = " ".join((f"{options.fraction:g} of what the weights leave", part)).strip()
        yield "KV cache", readable(plan.cache_bytes), part
        tokens = f"{plan.pages * options.page_size:,} tokens"
        yield "pages", f"{plan.pages:,}", tokens
    if plan.step is not None:
        yield "sequences of a step", f"{plan.step.seqs:,}", "on a GPU, by default"
        yield "tokens of a step", f"{plan.step.tokens:,}", "on a GPU, by default"
    if plan.alone is not None and plan.together is not None:
        yield "decoding, one sequence", f"{plan.alone:,.0f}", "tokens a second at most"
        yield "decoding, all together", f"{plan.together:,.0f}", "tokens a second at most"


def _needs(needs: Needs) -> tuple[str, str, str]:
    return (
        readable(needs.bytes),
        "?" if needs.fit is None else f"{needs.fit:,}",
        f"{needs.waste:.1%}",
    )
