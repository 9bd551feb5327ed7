"""The engine without a server, in a process that `load.py` stops and continues."""

from __future__ import annotations

import multiprocessing
import random
from argparse import Namespace
from typing import Any

from server.clients import Mix


class Bare:
    """The engine alone, in a separate process that is stopped except during its turns."""

    def __init__(self, args: Namespace) -> None:
        """Starts the process and waits until its engine is ready."""
        context = multiprocessing.get_context("spawn")
        self._generated = context.Value("q", lock=False)
        ready = context.Event()
        self._process = context.Process(
            target=_generate, args=(args, self._generated, ready), daemon=True
        )
        self._process.start()
        while not ready.wait(1.0):
            if not self._process.is_alive():
                raise RuntimeError(f"the bare engine ended with {self._process.exitcode}")
        assert self._process.pid is not None
        self.pids = [self._process.pid]

    @property
    def tokens(self) -> int:
        """Tokens that it has generated since its start."""
        return int(self._generated.value)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _generate(args: Namespace, generated: Any, ready: Any) -> None:
    """Answers the mix until the process is killed; counts tokens in `generated`."""
    from coppice import EngineConfig, SamplingParams
    from coppice.frontend.router.cluster.settings import SERVER_DEFAULTS
    from coppice.frontend.text.engine import TextEngine

    config = EngineConfig(
        model=args.model,
        kv_cache_tokens=args.pool,
        max_num_seqs=args.clients,
        **SERVER_DEFAULTS,
    )
    engine = TextEngine.load(config).engine
    mix = Mix(engine.model_config.vocab_size, args.shared, args.own, args.out)
    rng = random.Random(-1)
    ready.set()
    added = 0
    running: set[str] = set()
    while True:
        while len(running) < args.clients:
            running.add(str(added))
            params = SamplingParams(temperature=0, max_tokens=mix.length(rng), ignore_eos=True)
            engine.add_request(str(added), mix.prompt(rng), params)
            added += 1
        for output in engine.step():
            generated.value += len(output.new_token_ids)
            if output.finish_reason is not None:
                running.discard(output.request_id)
