"""The worker of `speculation_peers.py` for llama.cpp's server within this process.

The package xllamacpp has it compiled for AVX2, so it is a fair measure on processors that have no
more. `variant["drafts"]` names a kind of drafts of llama.cpp's server, such as `NGRAM_SIMPLE`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import xllamacpp
from on_llamacpp import LlamaCpp, gguf_file
from pipe import Unsupported, serve


class Embedded(LlamaCpp):
    """One slot, asked over loopback as the server's program is."""

    version = xllamacpp.__version__

    def __init__(self, options: dict[str, Any]) -> None:
        if options["precision"] != "float32":
            raise Unsupported("compared in float32 only")
        params = xllamacpp.CommonParams()
        params.model.path = str(gguf_file(options))
        params.n_ctx = options["length"] + 64
        params.n_parallel = 1
        params.n_batch = 2048
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.port = 0
        if drafts := options["variant"].get("drafts"):
            kind = getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{drafts}")
            params.speculative.types = [kind]
        self._kept = xllamacpp.Server(params)
        port = urlsplit(self._kept.listening_address).port
        assert port is not None
        self._port = port

    def close(self) -> None:
        """The server ends with the process."""


if __name__ == "__main__":
    serve(Embedded)
