"""Which of many replicas gets a request: the one at which it is expected to be answered first.

`choosing` decides, `hub` makes one engine of many, `cluster` runs them on Ray Serve. For
`serve deploy` and `serve run`, `app` makes the application.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def app(arguments: Mapping[str, Any]) -> Any:
    """The Serve application of replicas behind an ingress.

    `arguments` are `model` and the long options of `coppice serve`, with underscores; see
    docs/scale.md. Raises ValueError, naming the argument.
    """
    from coppice.frontend.router.cluster.application import build
    from coppice.frontend.router.cluster.settings import ClusterSettings

    return build(ClusterSettings.of(arguments))
