"""Makes the snapshots of an engine, which does not know them."""

from coppice.runtime.report.cache import make_report
from coppice.runtime.report.engine_stats import engine_stats as make_stats
from coppice.runtime.report.live import PinState, live_report, pin_state, tree_picture

__all__ = ["PinState", "live_report", "make_report", "make_stats", "pin_state", "tree_picture"]
