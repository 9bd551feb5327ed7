"""How numba's threads and torch's share the cores: the one place where that is set.

torch and numba each bring an OpenMP pool. By default an idle thread of either spins for
milliseconds while it waits for work, on a core that the other pool is about to need. Milliseconds
of a step's pattern (a linear layer of 32 rows of 1,024 x 4,096, then decode attention over
32 x 136 tokens; 2 threads on 2 cores, with another process on one of them):

    idle threads spin                                       17.5
    torch's spin, numba's do not                            15.6
    they spin briefly, then sleep (what is set here)        12.1
    they sleep at once                                      12.4
    numba's own pool instead of OpenMP                      12.3

Running numba's code on torch's pool gained nothing more.
"""

from __future__ import annotations

import logging
import os
import sys

_log = logging.getLogger(__name__)

# "passive" is the OpenMP standard's value; GNU's library also reads the count, about 50 us of
# spinning, which spans the gap between two operators of a layer.
_CALM = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def calm_waiting_threads() -> None:
    """Have idle OpenMP threads sleep soon, unless the environment already says how they wait.

    An OpenMP library reads this once, when it is loaded: call before torch is imported. Later it
    still reaches numba's pool if that has not started, and a log line names the remedy.
    """
    if any(name in os.environ for name in (*_CALM, "KMP_BLOCKTIME")):
        return
    os.environ.update(_CALM)
    if "torch" in sys.modules:
        _log.info(
            "torch was imported before coppice, so its idle threads spin beside numba's; "
            "to avoid it, import coppice first or set OMP_WAIT_POLICY=passive"
        )


def use_torch_threads() -> int:
    """Have numba use as many threads as torch does on this thread's behalf; returns the number."""
    import torch

    count = torch.get_num_threads()
    try:
        import numba
    except ImportError:
        return count  # plain torch does the work then
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    if torch.get_num_threads() != count:  # numba's pool sets it to all cores when it starts
        torch.set_num_threads(count)
    return count
