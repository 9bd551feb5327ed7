"""Without llguidance an engine runs, and refuses structured outputs by name."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["llguidance"] = None
import coppice.runtime.engine.core
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams
from coppice.runtime.sampling.grammar_source import source
try:
    source(StructuredOutputsParams(regex="a+"))
except ValueError as error:
    print(error)
"""


def test_structured_outputs_are_refused_where_the_library_is_not_installed():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("structured outputs need the package llguidance")
