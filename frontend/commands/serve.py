"""`coppice serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from dataclasses import replace

from coppice.frontend.commands.foreign import add_foreign_options
from coppice.frontend.commands.machine.launched import takes_part
from coppice.frontend.commands.options import (
    MODEL_HELP,
    Subparsers,
    add_cluster_options,
    add_engine_options,
    add_server_options,
    add_text_options,
    cluster_options,
    engine_options,
    server_options,
    text_options,
)
from coppice.frontend.router.cluster.settings import SERVER_DEFAULTS, ClusterSettings
from coppice.runtime.config import EngineConfig


def add_to(commands: Subparsers) -> None:
    """Adds the parser of `coppice serve`."""
    parser = commands.add_parser(
        "serve", help="start an OpenAI-compatible server", allow_abbrev=False
    )
    parser.shorten(
        "host port served_model_name api_key tokenizer dtype quantization max_model_len "
        "max_num_seqs kv_cache_tokens kv_cache_memory_fraction tool_call_parser log_format"
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    address = parser.grouped("host", "address")
    address.add_argument(
        "--host", default="127.0.0.1", metavar="NAME", help="address (default: %(default)s)"
    )
    address.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port; 0: a free one (default: 8000)"
    )
    add_text_options(parser)
    add_server_options(parser)
    add_cluster_options(parser)
    add_engine_options(parser, **SERVER_DEFAULTS)
    add_foreign_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises ValueError for a wrong argument."""
    if not 0 <= arguments.port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {arguments.port}")
    config = EngineConfig(model=arguments.model, **engine_options(arguments))
    text, options = text_options(arguments), server_options(arguments)
    if options.lora_modules:
        config = replace(config, enable_lora=True)
    cluster = cluster_options(arguments)
    options.keys(), options.tls()  # refuse wrong ones before the model is loaded
    if cluster.replicas is not None and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError(
            "replicas can't be given under torchrun: Ray starts a replica's ranks, on one machine; "
            f"got {cluster.replicas}"
        )
    if takes_part(config):
        return 0
    try:
        listener = _bound(arguments.host, arguments.port)
    except OSError as error:
        where = f"{arguments.host}:{arguments.port}"
        print(f"coppice serve: cannot listen on {where}: {error.strerror}", file=sys.stderr)
        return 1
    if cluster.replicas is not None:
        from coppice.frontend.router.cluster.start import serve_replicas

        with listener:
            serve_replicas(ClusterSettings(config, text, options, cluster), listener)
        return 0
    with listener:
        from coppice.frontend.server.run import serve

        serve(config, text, options, listener=listener)
    return 0


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to the port, so that a port in use is reported before the model is loaded.

    It does not listen yet: until the model is loaded, clients are refused and need not wait.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
