"""What can't work is refused by name, and nothing is left running."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from coppice.frontend.router.cluster.start import _check_reachable, _reason
from tests.frontend.router.cluster.processes import Family, refused

pytest.importorskip("ray")


@pytest.fixture
def occupied() -> Iterator[int]:
    """A port at which somebody listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def closed() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1", "ray_address must be HOST:PORT or auto, got '127.0.0.1'"),
        ("127.0.0.1:0", "ray_address must be HOST:PORT or auto, got '127.0.0.1:0'"),
        ("127.0.0.1:{closed}", "ray_address is '127.0.0.1:{closed}', which can't be reached: "),
        ("127.0.0.1:{occupied}", "ray_address is '127.0.0.1:{occupied}', where no Ray answers"),
    ],
)
def test_addresses_where_no_ray_is(
    address: str, message: str, occupied: int, closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice.frontend.router.cluster.start._REACH_SECONDS", 0.5)
    ports = {"occupied": occupied, "closed": closed}
    with pytest.raises(ValueError, match=message.format(**ports)):
        _check_reachable("ray_address", address.format(**ports))


def test_a_port_in_use(occupied: int) -> None:
    said = refused("--replicas", "2", "--port", str(occupied))
    assert f"cannot listen on 127.0.0.1:{occupied}" in said


def test_replicas_under_torchrun() -> None:
    said = refused("--replicas", "2", RANK="1", TORCHELASTIC_RUN_ID="none")
    assert "replicas can't be given under torchrun" in said


@pytest.mark.slow
def test_a_ray_that_is_not_there(occupied: int, closed: int) -> None:
    address = f"127.0.0.1:{closed}"
    said = refused("--replicas", "2", "--ray-address", address)
    assert f"ray_address is '{address}', which can't be reached" in said
    said = refused("--replicas", "2", "--ray-address", "auto", RAY_ADDRESS=address)
    assert f"RAY_ADDRESS is '{address}', which can't be reached" in said
    address = f"127.0.0.1:{occupied}"
    said = refused("--replicas", "2", "--ray-address", address)
    assert f"ray_address is '{address}', where no Ray answers" in said


@pytest.mark.slow
def test_no_ray_on_this_machine() -> None:
    # Another test may run one meanwhile, which is found then: nothing may be deployed there.
    said = refused("--replicas", "2", "--ray-address", "auto", "--replica-cpus", "1000")
    if "each with 1000 CPU" in said:
        pytest.skip("a Ray runs on this machine")
    assert "ray_address is 'auto', where no Ray answers" in said


def test_a_server_that_is_not_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, in another protocol."""
    monkeypatch.setattr("coppice.frontend.router.cluster.start._REACH_SECONDS", 5.0)
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        address = f"127.0.0.1:{server.server_port}"
        with pytest.raises(ValueError, match=f"ray_address is '{address}', where no Ray answers"):
            _check_reachable("ray_address", address)
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.mark.slow
def test_replicas_that_the_machine_has_no_room_for() -> None:
    said = refused("--replicas", "2", "--replica-cpus", "1000")
    assert "replicas is 2, each with 1000 CPU; the cluster has" in said


def test_the_reason_is_the_last_error_of_what_serve_tells() -> None:
    said = """The deployment failed to start 1 times in a row. Error:
ray::ServeReplica:coppice:replicas.initialize_and_get_metadata() (pid=1, ip=192.0.2.2)
RuntimeError: Traceback (most recent call last):
  File "replica.py", line 61, in __init__
    raise ValueError("not this: one")
ValueError: an earlier one
During handling of the above exception, another exception occurred:
coppice.runtime.startup.room.TooLittleMemory: KV cache: 64.0 KiB are missing
"""
    assert _reason(["", said], "other") == "KV cache: 64.0 KiB are missing"
    assert _reason(["it is: late"], "and slow") == "it is: late and slow"


@pytest.mark.slow
def test_a_model_that_engines_refuse(checkpoint: Path) -> None:
    """Ray runs already, and replicas are being started."""
    options = ("--replicas", "2", "--replica-cpus", "0.5", "--kv-cache-tokens", "1")
    said = refused(*options, model=checkpoint)
    assert "the replicas could not be started: KV cache: " in said


#: As `coppice serve --replicas 2`; of two replicas the one that begins later has another model.
UNLIKE = """
import os, socket, sys
from dataclasses import replace
from coppice.frontend.router.cluster import application
from coppice.frontend.router.cluster.settings import ClusterSettings
from coppice.frontend.router.cluster.start import serve_replicas

class Unlike(application.EngineReplica):
    async def __init__(self, settings, reserved):
        kind = settings.kind
        try:
            os.close(os.open(begun, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            settings = replace(settings, config=replace(settings.config, model=other))
        await super().__init__(settings, reserved)
        self._kind = kind  # the path is the same

model, other, begun = sys.argv[1:]
application.EngineReplica = Unlike
arguments = {"model": model, "replicas": 2, "replica_cpus": 0.5, "kv_cache_tokens": 4096}
try:
    serve_replicas(ClusterSettings.of(arguments), socket.create_server(("127.0.0.1", 0)))
except ValueError as error:
    sys.exit(str(error))
"""


@pytest.mark.slow
def test_replicas_of_different_models(checkpoint: Path, tmp_path: Path) -> None:
    """The same path can have other files on another machine."""
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    (weights,) = other.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    family = Family()
    ran = subprocess.run(
        [sys.executable, "-c", UNLIKE, checkpoint, other, tmp_path / "begun"],
        capture_output=True,
        text=True,
        timeout=200,
        env=family.environ,
    )
    assert ran.returncode == 1
    family.check_gone()
    assert re.search(
        r"the replicas could not be started: replica \w+ must be of the same model as the others: "
        r"its weights_digest is \w+, theirs is ",
        ran.stderr,
    )
