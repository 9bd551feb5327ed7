"""Settings that every test runs under: no network, one torch thread, no tokenizer threads.

They are set before torch, numba or transformers can be imported, since those read them once.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# Tiny models spend more time handing work to threads than doing it, and tests that start further
# processes must not ask for more cores than the machine has.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
