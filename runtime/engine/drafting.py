"""The drafts of one engine: what proposes them, and the life of its draft model."""

from __future__ import annotations

from pathlib import Path

from coppice.runtime.config import EngineConfig
from coppice.runtime.model.adapters.names import Adapter
from coppice.runtime.runner.cache.size import NOTHING_BESIDE
from coppice.runtime.runner.draft_model.network import DraftModel
from coppice.runtime.runner.draft_model.opening import open_draft_runner
from coppice.runtime.runner.forward import ModelRunner
from coppice.runtime.sampling.drafts.made import make_speculation
from coppice.runtime.sampling.drafts.policy import TreeSpeculation


class Drafting:
    """Makes what an engine's options ask for, in two steps around the loading of its model.

    Attributes:
        beside: what the draft model takes of the memory for the model's cache.
        speculation: proposes drafts; None: the options ask for none, or `start` was not called.
        model: the draft model; None: there is none.
    """

    def __init__(self, config: EngineConfig, tokenizer: Path) -> None:
        """Loads the draft model. Raises as `open_draft_runner`; `tokenizer` is the model's."""
        self._config = config
        self._runner = open_draft_runner(config, tokenizer)
        self.beside = NOTHING_BESIDE if self._runner is None else self._runner.beside
        self.speculation: TreeSpeculation | None = None
        self.model: DraftModel | None = None

    def start(self, runner: ModelRunner) -> None:
        """Makes the drafts of the model that `runner` has, and the draft model's cache."""
        config = self._config
        if not config.makes_drafts(on_gpu=runner.device.type == "cuda"):
            return
        tokens = runner.num_pages * config.page_size
        vocabulary = runner.model_config.vocab_size
        speculation = make_speculation(tokens, vocabulary, config.max_draft_tokens)
        if self._runner is not None:
            own = self._runner
            own.take_cache(runner.num_pages, runner.memory)
            self.model = DraftModel(
                own,
                vocabulary,
                runner.model_config.eos_token_ids,
                caching=config.enable_prefix_caching,
                policy=config.eviction_policy,
                most_rows=config.most_tokens,
            )
            stretch = config.max_step_stretch
            speculation.use_model(
                self.model,
                share=min(_weights(own) / max(_weights(runner), 1), 1.0),
                stretch=1.0 if stretch is None else min(stretch - 1, 1.0),
            )
        self.speculation = speculation

    def forget(self) -> None:
        """Forgets all text, and what the draft model has computed of it."""
        if self.speculation is not None:
            self.speculation.forget()

    def forget_adapter(self, adapter: Adapter) -> None:
        """Forgets the text of an adapter that is removed."""
        if self.speculation is not None:
            self.speculation.forget_adapter(adapter.identity, adapter.mark)

    def sleep(self, level: int) -> None:
        """Frees the draft model's memory as `ModelRunner.sleep` does, and forgets all text."""
        self.forget()
        if self._runner is not None:
            self._runner.sleep(level)

    def wake_up(self) -> None:
        """Undoes `sleep`. Raises ValueError if the draft model's weights can't be read."""
        if self._runner is not None and self._runner.asleep:
            self._runner.wake_up()

    def close(self) -> None:
        """Frees the draft model for good."""
        if self._runner is not None:
            self._runner.close()


def _weights(runner: ModelRunner) -> int:
    """Bytes of a model's weights, those that are stored in fewer bits included."""
    decoder = runner.decoder
    return sum(each.nbytes for each in (*decoder.parameters(), *decoder.buffers()))
