"""The options of the server, beside those of the engine: access, limits, what is logged."""

from __future__ import annotations

import hashlib
import math
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coppice.frontend.chat.request_template import MEMORY_BYTES, SECONDS
from coppice.frontend.http.lora_modules import all_modules

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "critical")
TOOL_CALL_PARSERS = (
    "auto", "hermes", "llama", "mistral", "qwen3_coder", "deepseek_v3", "deepseek_v31", "gpt_oss",
    "pythonic", "glm45", "glm47", "granite",
)  # fmt: skip
REASONING_PARSERS = ("auto", "none", "qwen3", "deepseek_r1", "gpt_oss", "mistral", "granite")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients may present, kept as its digest."""

    name: str
    digest: bytes  # SHA-256
    admin: bool = False


def _option(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Everything that can be chosen about a server.

    Each field's `metadata["help"]` is its help text on the command line. Raises ValueError with the
    name, the value and what is allowed.
    """

    served_model_name: tuple[str, ...] = _option(
        (),
        "names under which requests ask for the model, instead of MODEL (may be repeated); reports "
        "have the first; all words that follow are names, so write MODEL before them",
        several=True,
    )
    lora_modules: tuple[str, ...] = _option(
        (),
        "adapters to load at the start, as NAME=PATH or as JSON with name, path and "
        "base_model_name; requests ask for one as their model; implies enable_lora",
        several=True,
    )
    api_key: tuple[str, ...] = _option(
        (),
        "a key that clients must present, as KEY or NAME=KEY (may be repeated); logs and reports "
        "show the name; without keys, everybody is served",
    )
    api_key_file: str | None = _option(None, "file with one such key per line")
    admin_api_key: tuple[str, ...] = _option(
        (),
        "a key, in the same form, that also opens the cache's reports and controls and the "
        "metrics, which are then closed to other keys",
    )
    isolate_keys: bool = _option(
        False,
        "let no key reuse what the prompts of another key left in the cache, so that nobody can "
        "learn about them from timing; the cache's reports and the metrics then need an admin key",
    )
    max_concurrent_requests: int | None = _option(
        None, "most requests of one key that run at once; more are refused"
    )
    requests_per_minute: int | None = _option(
        None, "most requests that one key may begin in a minute; more are refused"
    )
    max_stream_delay: float = _option(
        0.1,
        "most seconds that a token of a stream waits, so that several are sent together; tokens "
        "wait only if sending each alone would take more than a tenth of a core; 0: none waits",
    )
    request_timeout: float | None = _option(
        None, "seconds after which a request is aborted and answered with an error"
    )
    engine_timeout: float = _option(
        300.0,
        "seconds after which an engine that does not answer, or whose step does not end, is killed "
        "and started again; 0: never",
    )
    drain_grace: float = _option(
        5.0,
        "seconds after SIGTERM in which the server still answers, requests with 503 and /health "
        "with the reason, so that a load balancer sees it; SIGINT, or a second signal: none",
    )
    drain_timeout: float = _option(
        30.0,
        "seconds that running requests have to end after that, or after SIGINT; in what they leave "
        "of them the cache is stored in --disk-cache and --shared-cache",
    )
    header_timeout: float = _option(
        30.0, "seconds that the first request of a connection may take to arrive, without its body"
    )
    body_timeout: float = _option(60.0, "seconds that the body of a request may take to arrive")
    max_body_bytes: int = _option(32 * 2**20, "largest body of a request")
    response_memory: int = _option(
        64 * 2**20,
        "most bytes of responses of one key that are kept in memory for previous_response_id of "
        "/v1/responses; 0: none is kept",
    )
    response_ttl: float = _option(
        24 * 3600.0, "seconds without use after which such a response is forgotten"
    )
    ssl_certfile: str | None = _option(
        None, "file with the server's certificate (PEM), and those that lead to a known one: TLS"
    )
    ssl_keyfile: str | None = _option(
        None, "file with the certificate's private key, if that is not in the same one"
    )
    ssl_keyfile_password: str | None = _option(None, "password of the private key, if it has one")
    ssl_ca_certs: str | None = _option(
        None, "file with the certificates (PEM) by which those of clients are checked"
    )
    ssl_cert_reqs: int = _option(
        0,
        "whether clients show a certificate, as Python's ssl counts: 0: none is asked for, 1: one "
        "that is shown is checked, 2: without a good one no connection is made",
    )
    root_path: str = _option(
        "",
        "path below which a proxy shows this server, such as /llm; requests may have it or not",
    )
    cors_origin: tuple[str, ...] = _option(
        (), "web page origin whose scripts may use the server, or * for all (may be repeated)"
    )
    tool_call_parser: str = _option(
        "auto",
        f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)}; auto: as its chat "
        f"template does",
    )
    reasoning_parser: str = _option(
        "auto",
        f"how the model marks its reasoning: {', '.join(REASONING_PARSERS)}; auto: as its chat "
        f"template does; none: reasoning is part of the text",
    )
    trust_request_chat_template: bool = _option(
        False,
        "take chat_template from requests; a template is a program that can't touch the machine, "
        f"and may take {SECONDS:g} s and {MEMORY_BYTES >> 20} MiB in a process of its own",
    )
    log_format: str = _option("text", f"format of log lines: {', '.join(LOG_FORMATS)}")
    log_level: str = _option("info", f"least important lines to log: {', '.join(LOG_LEVELS)}")
    report_text: bool = _option(
        False,
        "show text of prompts, not only lengths and hashes, in the cache's report and dashboard, "
        "to everybody who may read them",
    )
    log_prompts: bool = _option(False, "write prompts to the log")

    def __post_init__(self) -> None:
        for name in ("max_concurrent_requests", "requests_per_minute", "max_body_bytes"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        names = self.served_model_name
        if isinstance(names, str) or not all(isinstance(n, str) and n.strip() for n in names):
            raise ValueError(f"served_model_name must be a tuple of names, got {names!r}")
        all_modules(self.lora_modules)
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise ValueError(f"request_timeout must be above 0, got {self.request_timeout!r}")
        if isinstance(self.response_memory, bool) or not self.response_memory >= 0:
            raise ValueError(f"response_memory must be at least 0, got {self.response_memory!r}")
        if not self.response_ttl > 0:
            raise ValueError(f"response_ttl must be above 0, got {self.response_ttl!r}")
        if not 0 <= self.max_stream_delay < math.inf:
            raise ValueError(
                f"max_stream_delay must be at least 0 and finite, got {self.max_stream_delay!r}"
            )
        for name in ("engine_timeout", "drain_grace", "drain_timeout"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")
        for name in ("header_timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)!r}")
        if isinstance(self.ssl_cert_reqs, bool) or self.ssl_cert_reqs not in (0, 1, 2):
            raise ValueError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs!r}")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError(
                "ssl_cert_reqs needs ssl_ca_certs, the certificates by which others are checked"
            )
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ValueError(f"{name} needs ssl_certfile, the file of the certificate")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ValueError(
                f"root_path must be a path such as /llm, without / at its end, "
                f"got {self.root_path!r}"
            )
        if self.log_level not in LOG_LEVELS:
            raise ValueError(
                f"log_level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}"
            )
        if self.log_format not in LOG_FORMATS:
            raise ValueError(
                f"log_format must be one of {', '.join(LOG_FORMATS)}, got {self.log_format!r}"
            )
        if self.tool_call_parser not in TOOL_CALL_PARSERS:
            raise ValueError(
                f"tool_call_parser must be one of {', '.join(TOOL_CALL_PARSERS)}, "
                f"got {self.tool_call_parser!r}"
            )
        if self.reasoning_parser not in REASONING_PARSERS:
            raise ValueError(
                f"reasoning_parser must be one of {', '.join(REASONING_PARSERS)}, "
                f"got {self.reasoning_parser!r}"
            )
        for origin in self.cors_origin:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ValueError(f"cors_origin must be * or begin with http, got {origin!r}")

    def tls(self) -> ssl.SSLContext | None:
        """How connections are encrypted; None: not at all.

        Raises ValueError if the certificate or its key can't be read or do not belong together.
        """
        if self.ssl_certfile is None:
            return None
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name} must be a file, got {path!r}")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        password = self.ssl_keyfile_password or ""  # None would ask for it at the terminal
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: password)
        except OSError as error:  # SSLError is one
            raise ValueError(
                f"ssl_certfile and ssl_keyfile must be a certificate and its key in PEM form, "
                f"got {self.ssl_certfile!r} and {self.ssl_keyfile or 'the same file'!r}: {error}"
            ) from error
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except OSError as error:
                raise ValueError(
                    f"ssl_ca_certs must be certificates in PEM form, got {self.ssl_ca_certs!r}: "
                    f"{error}"
                ) from error
        context.verify_mode = ssl.VerifyMode(self.ssl_cert_reqs)
        return context

    def keys(self) -> list[ApiKey]:
        """All keys, with the names given or, by their places, "key-1", "admin-1".

        Raises ValueError if the file can't be read, a key is empty, or two keys have one name.
        """
        given: list[str] = list(self.api_key)
        if self.api_key_file is not None:
            try:
                lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"api_key_file cannot be read: {error}") from error
            read = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not read:
                raise ValueError(f"api_key_file must have a key in it, got {self.api_key_file}")
            given += read
        keys = [
            *_named(given, "key", "api_key"),
            *_named(self.admin_api_key, "admin", "admin_api_key"),
        ]
        for name in {key.name for key in keys}:
            if sum(key.name == name for key in keys) > 1:
                raise ValueError(f"api_key: two keys are named {name!r}")
        if self.isolate_keys and not keys:
            raise ValueError("isolate_keys needs keys: give some with --api-key")
        return keys


def _named(given: Iterable[str], prefix: str, option: str) -> list[ApiKey]:
    keys = []
    for place, item in enumerate(given, 1):
        name, separator, secret = item.partition("=")
        if not separator or not secret.strip("="):  # a key may end in the = of base64
            name, secret = f"{prefix}-{place}", item
        if not name or not secret.strip():
            raise ValueError(f"{option} must be KEY or NAME=KEY, got an empty one at place {place}")
        digest = hashlib.sha256(secret.strip().encode()).digest()
        keys.append(ApiKey(name, digest, admin=prefix == "admin"))
    return keys
