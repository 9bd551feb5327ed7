"""The settings of a cluster, and how many replicas a load asks for."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from coppice.frontend.router.cluster.handed import Holder, take
from coppice.frontend.router.cluster.scaling import BUSY, busy, policy, wanted
from coppice.frontend.router.cluster.settings import ClusterOptions, ClusterSettings
from coppice.runtime.metrics.events.load import Load


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas must be an integer of at least 1, got 0"),
        ({"replicas": True}, "replicas must be an integer of at least 1, got True"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas must be an integer of at least 3"),
        ({"max_replicas": 2}, "max_replicas needs replicas, which is not given; got 2"),
        ({"ray_address": "auto"}, "ray_address needs replicas"),
        ({"replicas": 1, "replica_cpus": 0}, "replica_cpus must be more than 0, got 0"),
        ({"replicas": 1, "upscale_delay": -1}, "upscale_delay must be at least 0 seconds, got -1"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterOptions(**options)


def test_arguments_of_a_serve_app() -> None:
    settings = ClusterSettings.of(
        {
            "model": "demo",
            "replicas": 2,
            "max_replicas": 4,
            "page_size": 32,
            "api_key": ["secret-key-1"],
            "isolate_keys": True,
            "port": 8123,
        }
    )
    assert (settings.config.model, settings.config.page_size) == ("demo", 32)
    assert settings.config.overtaking == 0.15, "as coppice serve has it"
    assert (settings.cluster.replicas, settings.cluster.most) == (2, 4)
    assert settings.options.api_key == ("secret-key-1",)
    assert (settings.host, settings.port) == ("0.0.0.0", 8123)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "model must be a folder, a hub id or demo, got None"),
        ({"model": "demo", "pagesize": 3}, "pagesize is no option of coppice serve"),
        ({"model": "demo", "page_size": 0}, "page_size must be"),
        ({"model": "demo", "port": 0}, "port must be from 1 to 65535, got 0"),
        (
            {"model": "demo", "lora_modules": ["demo=/a"]},
            "lora_modules: .demo.: lora_name",
        ),
        (
            {
                "model": "demo",
                "served_model_name": ["small"],
                "lora_modules": ['{"name": "a", "path": "/a", "base_model_name": "demo"}'],
            },
            "lora_modules: 'a': base_model_name must be one of small, got 'demo'",
        ),
        ({"model": "demo", "host": 5}, "host must be a name or an address, got 5"),
        ({"model": "demo", "replicas": None}, "replicas must be an integer of at least 1"),
        (
            {"model": "demo", "kv_events_endpoint": "tcp://*:5557"},
            "kv_events_endpoint can't be given with replicas",
        ),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterSettings.of(arguments)


def test_how_busy_an_engine_is() -> None:
    assert busy(Load(0, 0, 0, 0, 0.0, 0.0), 8) == 0
    assert busy(Load(2, 100, 6, 0, 0.0, 0.0), 8) == 1.0
    # 4,000 tokens at 1,000 a second wait for 4 s, twice what makes a replica busy.
    assert busy(Load(1, 3000, 1, 1000, 1000.0, 0.01), 8) == 2.0


@pytest.mark.parametrize(
    ("figures", "current", "count"),
    [([0.0], 1, 1), ([0.7], 1, 1), ([0.71], 1, 2), ([1.4, 0.7], 2, 3), ([0.1, 0.1, 0.1], 3, 1)],
)
def test_how_many_replicas_are_wanted(figures: list[float], current: int, count: int) -> None:
    assert wanted(figures, current) == count
    bounds = SimpleNamespace(
        aggregated_metrics={BUSY: dict(enumerate(figures))},
        current_num_replicas=current,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=2,
    )
    assert policy(bounds)[0] == min(count, 2)


def test_a_listening_socket_is_handed_on() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    holder = Holder(listener)
    first = take(holder.name)
    assert first is not None
    first.close()
    with socket.create_connection(address, 5) as waits:  # nobody accepts; it is not refused
        second = take(holder.name)
        assert second is not None
        accepted, _ = second.accept()
        accepted.sendall(b"hello")
        assert waits.recv(5) == b"hello"
        accepted.close()
        second.close()
    holder.close()
    assert take(holder.name) is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 5)
