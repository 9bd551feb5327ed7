"""The most sequences and tokens of an engine's steps, where its options leave them open."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from coppice.runtime.config import EngineConfig
from coppice.runtime.model.files.path import resolve_model
from coppice.runtime.model.parallel.division import check_division
from coppice.runtime.model.weights import resolve_device
from coppice.runtime.planning.numbers import count
from coppice.runtime.planning.plan import largest_part
from coppice.runtime.planning.steps import Rates, step_sizes
from coppice.runtime.runner.implementation import choose
from coppice.runtime.startup.room import readable

logger = logging.getLogger(__name__)

# FLOP of dense 16-bit products, summed in float32, of a multiprocessor in a cycle, by compute
# capability: from the data sheets of A100, RTX 3090, L40S, H100, B200, RTX 5090. Chips for games
# have half of the L40S's; they are told from it by their memory.
_PRODUCTS = {(8, 0): 2048, (8, 6): 512, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 512}

# Of a GPU that does not tell its clocks, by whether it has this much memory.
_LARGE = 60 * 2**30
_ASSUMED = {True: (2.0e12, 500e12), False: (0.8e12, 150e12)}


def sized(config: EngineConfig) -> EngineConfig:
    """The options with ``max_num_seqs`` and ``max_num_batched_tokens`` as numbers.

    On a CPU they have fixed defaults. On a GPU these follow from its memory and rates and from the
    model (``planning.steps``), and are logged.
    """
    if config.max_num_seqs is not None and config.max_num_batched_tokens is not None:
        return config
    device = resolve_device(config.device)
    seqs, tokens = config.most_seqs, config.most_tokens
    if device.type == "cuda":
        model = choose(resolve_model(config.model, config.revision), config).config
        rates = device_rates(device)
        itemsize = 4 if config.dtype == "float32" else 2
        check_division(model, config.tensor_parallel_size)
        part = largest_part(model, config.tensor_parallel_size)
        sizes = step_sizes(part, count(part), rates, itemsize)
        if config.max_num_seqs is None:
            seqs = max(sizes.seqs, *(config.cuda_graph_sizes or (1,)))
            seqs = min(seqs, config.max_num_batched_tokens or seqs)
        if config.max_num_batched_tokens is None:
            tokens = max(sizes.tokens, seqs)
        logger.info(
            "a step has at most %d sequences and %s tokens (max_num_seqs, max_num_batched_tokens), "
            "by default for a GPU of %s that reads %.2f TB/s and multiplies at %.0f TFLOP/s",
            seqs,
            f"{tokens:,}",
            readable(rates.memory),
            rates.bandwidth / 1e12,
            rates.products / 1e12,
        )
    return replace(config, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def device_rates(device: torch.device) -> Rates:
    """Memory and rates of a GPU, as its clocks and width of memory promise them.

    Where the driver does not tell these, they are assumed from its memory.
    """
    memory = int(torch.cuda.mem_get_info(device)[1])
    properties = torch.cuda.get_device_properties(device)
    clock, memory_clock, width = (
        getattr(properties, name, 0)
        for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    )
    flop = _PRODUCTS.get((properties.major, properties.minor))
    if not (clock and memory_clock and width and flop):
        return Rates(memory, *_ASSUMED[memory >= _LARGE])
    if (properties.major, properties.minor) == (8, 9) and memory < 30 * 2**30:
        flop //= 2
    # Clocks are in kHz, the width is in bits, and memory transfers twice in a cycle.
    bandwidth = 2 * memory_clock * 1e3 * width / 8
    return Rates(memory, bandwidth, properties.multi_processor_count * clock * 1e3 * flop)
