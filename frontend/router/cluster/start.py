"""`coppice serve --replicas`: starts or joins Ray, deploys, waits for a signal, ends in order."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from coppice.frontend.http import logs
from coppice.frontend.router.cluster.handed import Holder
from coppice.frontend.router.cluster.settings import ClusterSettings
from coppice.frontend.text.model.loading import load_around

_REACH_SECONDS = 5.0
_LOOK_SECONDS = 0.2  # between two looks whether all replicas are there
_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # an empty frame: its length, type, flags, stream
_ANSWER_SECONDS = 5.0  # for an ingress, which may be dead
_STORE_BYTES = 100 << 20  # of Ray's object store, through which no request passes


def serve_replicas(settings: ClusterSettings, listener: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM, then lets running requests end, as `serve` does.

    `listener` is bound to the address; it is closed at the end.

    Raises ValueError: Ray is not installed or can't be reached, there is no such model, or what
    replicas need does not fit.
    """
    try:
        import ray
        from ray import serve
        from ray.serve.schema import LoggingConfig

        from coppice.frontend.router.cluster.application import NAME
    except ImportError as error:
        raise ValueError(
            f"replicas is {settings.cluster.replicas}; it needs Ray: "
            f"pip install 'coppice[ray]' ({error})"
        ) from error
    load_around(settings.config, settings.text, without_torch=True)  # refuses what is wrong
    logs.configure(settings.options.log_format, settings.options.log_level)
    print(f"model   {settings.config.model}", flush=True)
    stop, signals = threading.Event(), list[int]()
    hurry = threading.Event()

    def end(signum: int, _: object) -> None:
        signals.append(signum)
        (hurry if stop.is_set() else stop).set()

    started, ours = _connect(settings.cluster.ray_address), False
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, end)
    try:
        with closing(Holder(listener)) as holder:
            host, port = listener.getsockname()[:2]
            settings = replace(
                settings,
                host=host,
                port=port,
                node=ray.util.get_node_ip_address(),
                engines_at="127.0.0.1" if started else None,
                handed=holder.name,
            )
            _check_fits(settings)
            quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
            serve.start(proxy_location="Disabled", logging_config=quiet)
            if NAME in serve.status().applications:
                raise ValueError(
                    f"ray_address is {settings.cluster.ray_address!r}, where an application "
                    f"{NAME!r} runs already; end that one first"
                )
            ours = True
            if not _deployed(settings, stop):
                return
            handle = serve.get_app_handle(NAME)
            try:
                print(handle.describe.remote(settings.cluster.replicas).result(), flush=True)
            except ray.exceptions.RayTaskError as error:
                raise ValueError(f"the replicas could not be started: {error.cause}") from None
            while not stop.wait(1.0):
                pass
            grace = settings.options.drain_grace if signals[0] == signal.SIGTERM else None
            ours = not _ended(handle, holder, grace, hurry)
    finally:
        if ours and not started:
            serve.delete(NAME, _blocking=False)
        ray.shutdown()


def _ended(handle: Any, holder: Holder, grace: float | None, hurry: threading.Event) -> bool:
    """Ends the application in order; returns whether it is deleted, which it may not be in a hurry.

    `handle`: of its ingress, which refuses requests for `grace` seconds before; None: it does not.
    """
    deleted = threading.Event()
    ending = threading.Thread(target=_end, args=(handle, holder, grace, deleted), daemon=True)
    ending.start()
    while ending.is_alive() and not hurry.is_set():
        ending.join(0.2)
    return deleted.is_set()


def _end(handle: Any, holder: Holder, grace: float | None, deleted: threading.Event) -> None:
    from ray import serve

    from coppice.frontend.router.cluster.application import NAME

    try:
        running = handle.running.remote().result(timeout_s=_ANSWER_SECONDS)
        print(f"stopping; requests still running: {running}", flush=True)
        if grace is not None:
            handle.drain.remote().result(timeout_s=grace + _ANSWER_SECONDS)
    except Exception as error:  # it has died, and there may be no other one yet
        print(f"the ingress does not answer: {type(error).__name__}", flush=True)
    finally:
        holder.close()  # else connections would wait for an ingress that does not come
        while not deleted.is_set():
            with suppress(TimeoutError):  # after a minute, while requests may still run
                serve.delete(NAME)
                deleted.set()


def _connect(address: str | None) -> bool:
    """Joins a Ray cluster, or starts one here; returns whether it did the latter."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Else every worker gives way to whatever else runs on the machine, engines and ingress, too.
    os.environ.setdefault("RAY_worker_niceness", "0")
    logging.getLogger("ray").setLevel(logging.WARNING)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if address is None:
        ray.init(
            address="local",  # without it Ray joins a cluster that happens to run here
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            logging_level=logging.WARNING,
            configure_logging=False,
        )
        return True
    given = os.environ.get("RAY_ADDRESS") if address == "auto" else None  # which Ray would take
    if given or address != "auto":
        _check_reachable("RAY_ADDRESS" if given else "ray_address", given or address)
    try:
        ray.init(address=address, logging_level=logging.WARNING, configure_logging=False)
    except Exception as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"ray_address is {address!r}, where no Ray answers: {text}") from error
    return False


def _check_reachable(name: str, address: str) -> None:
    """Raises ValueError if nobody listens at an address, or nobody that could be Ray.

    Ray itself would try for minutes, and end the process in the end.
    """
    found = re.fullmatch(r"(?:ray://)?\[?([^\[\]]+?)\]?:(\d{1,5})", address)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ValueError(f"{name} must be HOST:PORT or auto, got {address!r}")
    host, port = found[1], int(found[2])
    try:
        connection = socket.create_connection((host, port), _REACH_SECONDS)
    except OSError as error:
        raise ValueError(f"{name} is {address!r}, which can't be reached: {error}") from None
    with connection:
        if os.environ.get("RAY_USE_TLS", "0") == "0" and not _speaks_http2(connection):
            raise ValueError(f"{name} is {address!r}, where no Ray answers")


def _speaks_http2(connection: socket.socket) -> bool:
    """Whether who listens begins HTTP/2, as gRPC servers do: with its settings (RFC 9113, 3.4)."""
    connection.settimeout(_REACH_SECONDS)
    try:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
        return connection.recv(9, socket.MSG_WAITALL)[3:4] == _SETTINGS[3:4]
    except OSError:
        return False


def _check_fits(settings: ClusterSettings) -> None:
    """Raises ValueError if the cluster has not what the replicas are to have."""
    import ray

    from coppice.frontend.router.cluster.application import reserved

    there = ray.cluster_resources()
    count = settings.cluster.replicas or 1
    for name, each in reserved(settings).items():
        have = there.get(name, 0)
        if each * count > have:
            raise ValueError(
                f"replicas is {count}, each with {each:g} {name}; the cluster has {have:g}"
            )


def _deployed(settings: ClusterSettings, stop: threading.Event) -> bool:
    """Deploys, and waits until requests are taken; False if a signal came meanwhile.

    Raises ValueError with why it failed.
    """
    from ray import serve

    from coppice.frontend.router.cluster.application import NAME, build

    target = serve.RunTarget(build(settings), name=NAME, route_prefix=None)
    serve.run_many(
        [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )
    while not stop.wait(_LOOK_SECONDS):
        application = serve.status().applications.get(NAME)
        if application is None or application.status in ("NOT_STARTED", "DEPLOYING"):
            continue
        if application.status == "RUNNING":
            return True
        why = [each.message for each in application.deployments.values() if each.message]
        raise ValueError(f"the replicas could not be started: {_reason(why, application.message)}")
    return False


def _reason(messages: list[str], otherwise: str) -> str:
    """The error of a replica, from what Serve says about it, which ends with its call stack."""
    for message in messages:
        # The class of an error is a builtin one, or follows its module.
        errors = re.findall(r"^(?:\w+Error|(?:\w+\.)+[A-Z]\w*): (?!Traceback)(.+)$", message, re.M)
        if errors:
            return str(errors[-1])
    return " ".join([*messages, otherwise]).strip()
