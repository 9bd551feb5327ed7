"""The files for `serve deploy` and KubeRay in docs/scale.md are right, and the first one runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from coppice.frontend.router.cluster.settings import ClusterSettings
from tests.frontend.router.cluster.processes import BIN, Family, free_port
from tests.frontend.router.cluster.traffic import TEXT, until

pytest.importorskip("ray")

# Ray's schemas use what pydantic is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")

PAGE = Path(__file__).resolve().parents[4] / "docs" / "scale.md"


def documents() -> list[Any]:
    """What is in the page's YAML: the file for `serve deploy`, the RayService, the Service."""
    blocks = re.findall(r"^```yaml\n(.+?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return [each for block in blocks for each in yaml.safe_load_all(block)]


def settings_of(deployed: Any) -> ClusterSettings:
    """Our settings in such a file, which Ray's schema takes."""
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(deployed)
    assert schema.proxy_location == "Disabled", "the ingress listens itself"
    (application,) = schema.applications
    assert application.import_path == "coppice.frontend.router:app"
    assert application.route_prefix is None
    return ClusterSettings.of(application.args)


def test_the_file_for_serve_deploy() -> None:
    deployed, *_ = documents()
    settings = settings_of(deployed)
    assert (settings.cluster.replicas, settings.cluster.most) == (2, 8)
    keys = settings.options.keys()
    assert [key.name for key in keys] == ["key-1", "key-2"]


def test_the_manifest_for_kuberay() -> None:
    """What KubeRay wants: `initLivenessAndReadinessProbe` and `BuildServeService` in its source."""
    _, ray_service, service = documents()
    settings = settings_of(yaml.safe_load(ray_service["spec"]["serveConfigV2"]))
    assert settings.host == "0.0.0.0"
    assert settings.config.device == "cuda", "not auto: no GPU may be there when it is made"
    cluster = ray_service["spec"]["rayClusterConfig"]
    head = cluster["headGroupSpec"]["template"]
    (container,) = head["spec"]["containers"]
    assert container["ports"] == [{"containerPort": settings.port, "name": "serve"}]
    assert "readinessProbe" not in container, "nothing is deployed before the head is ready"
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == settings.cluster.replicas
    (container,) = workers["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/api/local_raylet_healthz"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] == settings.port
    selector = service["spec"]["selector"]
    assert selector.pop("ray.io/node-type") == "head"
    assert selector.pop("ray.io/serve") == "true", "KubeRay's label of a head whose ingress answers"
    assert selector == head["metadata"]["labels"]


@contextmanager
def ray_head(family: Family) -> Iterator[tuple[str, str]]:
    """`ray start --head`, on loopback; the addresses of its dashboard, and of its node's agent."""
    ports = {
        name: free_port() for name in ("port", "dashboard-port", "dashboard-agent-listen-port")
    }
    # Not pytest's folder: names of Unix sockets have at most 107 bytes.
    folder = tempfile.mkdtemp(prefix="coppice-")
    options = [f"--{name}={port}" for name, port in ports.items()]
    options += ["--node-ip-address=127.0.0.1", "--num-cpus=2", "--object-store-memory=100000000"]
    started = subprocess.Popen(
        [BIN / "ray", "start", "--head", "--block", f"--temp-dir={folder}", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=family.environ,
    )
    try:
        agent = ports["dashboard-agent-listen-port"]
        yield f"http://127.0.0.1:{ports['dashboard-port']}", f"http://127.0.0.1:{agent}"
    finally:
        started.terminate()
        started.wait(60)
        family.check_gone()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
async def test_serve_deploy_runs_the_file(
    checkpoint: Path, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    deployed, ray_service, _ = documents()
    arguments = deployed["applications"][0]["args"]
    port = free_port()
    arguments |= {"model": str(checkpoint), "port": port, "host": "127.0.0.1"}
    arguments |= {"kv_cache_tokens": 4096, "replica_cpus": 0.2, "admin_api_key": ["ops"]}
    file = tmp_path / "coppice.yaml"
    file.write_text(yaml.safe_dump(deployed))
    family = Family()
    family.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    url = f"http://127.0.0.1:{port}"

    async def ask(path: str, key: str | None = None) -> tuple[int, Any]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        body = None if path.startswith("/-") else {"prompt": TEXT, "max_tokens": 4}
        try:
            async with session.request(
                "GET" if body is None else "POST", url + path, json=body, headers=headers
            ) as answer:
                return answer.status, await answer.text()
        except aiohttp.ClientError:
            return 0, None

    with ray_head(family) as (dashboard, agent):
        # The probe of the manifest's workers.
        workers = ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]
        probe = workers["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"]

        async def is_there(address: str) -> bool:
            try:
                async with session.get(address) as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await until(lambda: is_there(agent + probe), 120)
        await until(lambda: is_there(f"{dashboard}/api/serve/applications/"), 120)
        ran = subprocess.run(
            [BIN / "serve", "deploy", file, "--address", dashboard],
            capture_output=True,
            text=True,
            timeout=120,
            env=family.environ,
        )
        assert ran.returncode == 0, ran.stderr

        async def takes_requests() -> bool:
            return await ask("/-/healthz") == (200, "success")

        await until(takes_requests, 120)
        assert (await ask("/v1/completions"))[0] == 401
        assert (await ask("/v1/completions", "one-secret"))[0] == 200
        assert len(family.engines) == 2
