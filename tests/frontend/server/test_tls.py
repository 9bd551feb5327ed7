"""A server with TLS, below a path, with little to log: as it stands beside a proxy."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from coppice.frontend.commands.main import main
from coppice.frontend.commands.options import add_server_options, server_options
from coppice.frontend.commands.parser import CommandParser
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.text.engine import TextEngine

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the program openssl, which makes a certificate")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=coppice", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key


def test_a_server_with_tls(
    served: Callable[..., str], checkpoint: Path, certificate: tuple[Path, Path]
) -> None:
    """With vLLM's names of all three options."""
    url = served(
        "--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1]),
        "--root-path", "/llm", "--uvicorn-log-level", "warning",
    )  # fmt: skip
    assert url.startswith("https://")
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    with httpx.Client(base_url=url, verify=trusting, timeout=60) as client:
        body = {"model": str(checkpoint), "prompt": "The key", "max_tokens": 3, "stream": True}
        answer = client.post("/llm/v1/completions", json=body)
        assert answer.text.endswith("data: [DONE]\n\n")
        assert client.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    with pytest.raises(httpx.ConnectError, match=r"self.signed"):
        httpx.get(url + "/health")
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http") + "/health")


@pytest.mark.parametrize(
    ("required", "shown", "accepted"),
    [(0, False, True), (1, False, True), (1, True, True), (2, False, False), (2, True, True)],
)
def test_certificates_of_clients(
    certificate: tuple[Path, Path], required: int, shown: bool, accepted: bool
) -> None:
    """By vLLM's options, as its server passes them to Python's ssl."""
    file, key = map(str, certificate)
    given = ["--ssl-certfile", file, "--ssl-keyfile", key, "--ssl-ca-certs", file]
    parser = CommandParser()
    add_server_options(parser)
    options = server_options(parser.parse_args([*given, "--ssl-cert-reqs", str(required)]))
    context = options.tls()
    assert context is not None
    trusting = ssl.create_default_context(cafile=file)
    if shown:
        trusting.load_cert_chain(file, key)
    ours, theirs = socket.socketpair()

    def connect() -> None:
        try:
            with trusting.wrap_socket(theirs, server_hostname="127.0.0.1") as connection:
                connection.recv(1)
        except OSError:  # the server has refused
            theirs.close()

    client = threading.Thread(target=connect)
    client.start()
    try:
        with context.wrap_socket(ours, server_side=True):
            assert accepted
    except ssl.SSLError:
        assert not accepted
        ours.close()
    client.join()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssl_keyfile": "key"}, "ssl_keyfile needs ssl_certfile"),
        ({"ssl_certfile": "nowhere"}, "ssl_certfile must be a file, got 'nowhere'"),
        ({"ssl_certfile": __file__}, "must be a certificate and its key in PEM form, got "),
        ({"ssl_certfile": __file__, "ssl_keyfile": "no"}, "ssl_keyfile must be a file, got 'no'"),
        ({"ssl_ca_certs": "ca"}, "ssl_ca_certs needs ssl_certfile"),
        ({"ssl_cert_reqs": 2}, "ssl_cert_reqs needs ssl_ca_certs"),
        ({"ssl_cert_reqs": 3}, "ssl_cert_reqs must be 0, 1 or 2, got 3"),
        ({"root_path": "llm"}, "root_path must be a path such as /llm, .* got 'llm'"),
        ({"root_path": "/llm/"}, "root_path must be a path such as /llm, .* got '/llm/'"),
        ({"root_path": "/{x}"}, "root_path must be a path such as /llm"),
        ({"log_level": "loud"}, "log_level must be one of trace, debug, info, .* got 'loud'"),
        ({"header_timeout": 0}, "header_timeout must be above 0, got 0"),
        ({"body_timeout": -1}, "body_timeout must be above 0, got -1"),
        ({"drain_grace": -1}, "drain_grace must be at least 0, got -1"),
        ({"engine_timeout": -1}, "engine_timeout must be at least 0, got -1"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServerOptions(**options).tls()


def test_a_wrong_certificate_is_refused_before_the_model_is_loaded(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(checkpoint), "--port", "0", "--ssl-certfile", "nowhere"]) != 0
    assert "ssl_certfile must be a file, got 'nowhere'" in capsys.readouterr().err


def test_a_server_below_a_path(text_engine: TextEngine, live_server: type[LiveServer]) -> None:
    """The proxy may leave the path as it is, or take its beginning away."""
    server = live_server(text_engine, root_path="/llm", admin_api_key=("x=secret",))
    key = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=server.url) as client:
        for root in ("", "/llm"):
            assert client.get(f"{root}/health").status_code == 200
            assert client.get(f"{root}/cache").status_code == 200
            assert client.get(f"{root}/cache/page/main.js").status_code == 200
            for path in ("/v1/models", "/metrics", "/cache/report", "/openapi.json"):
                assert client.get(root + path).status_code == 401
                assert client.get(root + path, headers=key).status_code == 200
            assert client.get(f"{root}/nowhere", headers=key).status_code == 404
        assert client.get("/llmv1/models", headers=key).status_code == 404
        metrics = client.get("/llm/metrics", headers=key).text
    assert 'route="/v1/models",status="200"} 2.0' in metrics.replace('method="GET",', "")
    assert "/llm" not in metrics
    server.close()
