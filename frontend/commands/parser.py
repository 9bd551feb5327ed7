"""The parser of one command: short help first, all options in groups with `--help-all`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from coppice.frontend.commands.foreign import flag, with_flags
from coppice.frontend.python.foreign_options import FOREIGN, RARE, Renamed

_GROUPS: Mapping[str, str] = {
    "model and tokenizer": "revision tokenizer dtype quantization device tensor_parallel_size "
    "model_impl load_format max_model_len chat_template trust_request_chat_template "
    "tool_call_parser reasoning_parser",
    "defaults of requests": "generation_config override_generation_config seed",
    "KV cache": "kv_cache_tokens kv_cache_memory_fraction kv_cache_dtype page_size "
    "enable_prefix_caching eviction_policy pin_budget",
    "tiers beyond the KV cache": "host_cache disk_cache disk_cache_size disk_cache_dtype "
    "shared_cache shared_cache_dtype",
    "steps and the queue": "max_num_seqs max_num_batched_tokens scheduling_policy overtaking "
    "max_step_stretch max_queued_requests max_queued_tokens async_scheduling",
    "drafts": "speculation max_draft_tokens draft_model",
    "kernels": "attention_backend flashinfer_kernels deterministic enforce_eager cuda_graph_sizes",
    "events for routers": "kv_events_endpoint kv_events_replay_endpoint kv_events_topic "
    "kv_events_block_size kv_events_encoding kv_events_exact_topic",
    "who may ask, and how much": "api_key api_key_file admin_api_key isolate_keys cors_origin "
    "max_concurrent_requests requests_per_minute max_body_bytes",
    "time": "request_timeout drain_timeout drain_grace header_timeout body_timeout engine_timeout "
    "max_stream_delay",
    "address": "host port root_path ssl_certfile ssl_keyfile ssl_keyfile_password "
    "ssl_ca_certs ssl_cert_reqs",
    "logs and reports": "log_format log_level log_prompts report_text",
}
"""The options of each group by their names; others stay in the group that a command gives them."""

_TITLES = {name: title for title, names in _GROUPS.items() for name in names.split()}
_OTHER_FLAGS = {
    form
    for name, each in FOREIGN.items()
    if isinstance(each, Renamed)
    for form in (flag(name), f"--no-{flag(name)[2:]}")
}


class _Formatter(argparse.HelpFormatter):
    """Shows the flags of an option that are ours; its other names stand in the text."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        every = action.option_strings
        action.option_strings = [each for each in every if each not in _OTHER_FLAGS]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = every


class CommandParser(argparse.ArgumentParser):
    """Refuses unknown arguments with the usage of its command.

    By default `argparse` reports them with the usage of the main parser, which lists no options.
    """

    common: Sequence[str] = ()
    all_help = False

    def __init__(self, *args: Any, **options: Any) -> None:
        options["formatter_class"] = _Formatter
        super().__init__(*args, **options)
        self._taken: tuple[str, Sequence[str]] | None = None  # the last option with a list

    def took(self, option: str, words: Sequence[str]) -> None:
        """Notes the words that an option took, which may have been meant for an argument."""
        self._taken = option, words

    def error(self, message: str) -> NoReturn:
        lacking = message.startswith("the following arguments are required")
        if lacking and self._taken is not None:
            option, words = self._taken
            (name, *_) = [str(each.metavar) for each in self._get_positional_actions()]
            message += (
                f"; {option} takes all words that follow it, here {' '.join(words)}: write {name} "
                f"before it, as in {self.prog} {words[-1]} {option} "
                f"{' '.join(words[:-1]) or 'NAME'}"
            )
        super().error(message)

    def shorten(self, common: str) -> None:
        """`--help` shows only these options, named in a text, and the arguments without a flag.

        `--help-all` shows all. Call it first.
        """
        self.common = common.split()
        self.add_argument(
            "--help-all", action=_HelpAll, nargs=0, help="show all options, in groups, and exit"
        )

    def grouped(self, name: str, title: str) -> argparse._ArgumentGroup:
        """The group of the option of that name; `title` is that of options without a group."""
        title = _TITLES.get(name, title)
        for group in self._action_groups:
            if group.title == title:
                return group
        return self.add_argument_group(title)

    def format_usage(self) -> str:
        if not self.common:
            return super().format_usage()
        names = [each.metavar or each.dest for each in self._get_positional_actions()]
        return f"usage: {self.prog} [-h] [--help-all] [options] {' '.join(map(str, names))}\n"

    def format_help(self) -> str:
        formatter = self._get_formatter()
        usage = self.format_usage() if self.common else super().format_usage()
        formatter.add_text(self.description)
        short = self.common and not self.all_help
        for title, description, actions in self._short() if short else self._whole():
            if actions:
                formatter.start_section(title)
                formatter.add_text(description)
                formatter.add_arguments(actions)
                formatter.end_section()
        if short:
            shown = len(self.common)
            every = sum(
                each.help != argparse.SUPPRESS and bool(each.option_strings)
                for each in self._actions
            )
            formatter.add_text(f"{every - shown - 2} more options: {self.prog} --help-all")
        return usage + "\n" + formatter.format_help()

    def _short(self) -> Iterator[tuple[str | None, str | None, list[argparse.Action]]]:
        """The sections of the short help: arguments, and the options that most people need."""
        yield "arguments", None, self._get_positional_actions()
        named = {each.dest: each for each in self._actions}
        yield "options", None, [named[name] for name in (*self.common, "help", "help_all")]

    def _whole(self) -> Iterator[tuple[str | None, str | None, list[argparse.Action]]]:
        """Those of the whole help."""
        for group in self._action_groups:
            yield group.title, group.description, group._group_actions

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown]
            for each in flags:
                instead = RARE.get(each.removeprefix("--no-").removeprefix("--").replace("-", "_"))
                if each.startswith("--") and instead is not None:
                    self.error(f"{each} is not an option here: {with_flags(instead, self)}")
            text = f"unrecognized arguments: {' '.join(unknown)}"
            served = _serve_flags().intersection(flags)
            if served:
                which = ", ".join(sorted(served))
                text += f"; {which}: of coppice serve, not of {self.prog}"
            self.error(text)
        return parsed, unknown


def _serve_flags() -> set[str]:
    """The options that only a server has. Loaded late: most calls need none of it."""
    from coppice.frontend.http.options import ServerOptions

    return {flag(each.name) for each in fields(ServerOptions)} | {"--host", "--port"}


class Several(argparse.Action):
    """Adds all words that follow to a list, each time."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), *values])
        parser.took(option, values)


class _HelpAll(argparse.Action):
    """Prints all options and ends."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        parser.all_help = True
        parser.print_help()
        parser.exit()
