"""These tests are of one engine and its process, not of what stands behind a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from coppice.frontend.client.engine import EngineClient
from tests.frontend.conftest import client_of


@pytest.fixture
def engine_client() -> Callable[..., EngineClient]:
    """Makes a client, to be started, of an engine that runs in a thread of the test."""
    return partial(client_of, behind="engine")
