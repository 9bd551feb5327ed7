"""The Serve application: deployments of replicas and of their ingress."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from coppice.frontend.router.cluster.ingress import Ingress
from coppice.frontend.router.cluster.replica import EngineReplica
from coppice.frontend.router.cluster.request_router import ReplicaRouter
from coppice.frontend.router.cluster.scaling import policy
from coppice.frontend.router.cluster.settings import ClusterSettings

#: The name of the application that `coppice serve` deploys.
NAME = "coppice"

# Of the head node alone. There the ingress is found, and the next one gets its listening socket.
_HEAD = "node:__internal_head__"
_SESSIONS = 1000  # most ingresses of a replica
_HEALTH_SECONDS = 2.0  # between two checks
_QUIET = {"log_level": "WARNING", "enable_access_log": False}  # what Serve logs of its own
_LATEST = 5.0  # seconds that an orderly end may take beside draining


def build(settings: ClusterSettings) -> serve.Application:
    """The application, to be deployed. Raises ValueError for settings that are not acceptable."""
    options = settings.options
    drain = options.drain_grace + options.drain_timeout + _LATEST
    replicas = serve.deployment(
        EngineReplica,
        name="replicas",
        max_ongoing_requests=_SESSIONS,
        logging_config=_QUIET,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=drain + _LATEST,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=1,
        request_router_config=RequestRouterConfig(request_router_class=ReplicaRouter),
        **_placed(settings),
        **_count(settings),
    )
    node = _HEAD if settings.node is None else f"node:{settings.node}"
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        num_replicas=1,
        max_surge_percent=100,  # the next one listens before this one ends
        max_ongoing_requests=_SESSIONS,
        logging_config=_QUIET,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=drain,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=1,
        ray_actor_options={"num_cpus": 0, "resources": {node: 0.001}},
    )
    return ingress.bind(
        settings.of_ingress(), replicas.bind(settings.of_replica(), reserved(settings))
    )


def _count(settings: ClusterSettings) -> dict[str, Any]:
    cluster = settings.cluster
    if cluster.max_replicas is None or cluster.max_replicas == cluster.replicas:
        return {"num_replicas": cluster.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=cluster.replicas,
            max_replicas=cluster.max_replicas,
            upscale_delay_s=cluster.upscale_delay,
            downscale_delay_s=cluster.downscale_delay,
            metrics_interval_s=1.0,
            look_back_period_s=2.0,
            policy=AutoscalingPolicy(policy_function=policy),
        )
    }


def reserved(settings: ClusterSettings) -> dict[str, float]:
    """What Ray keeps for each replica, by the names of its resources."""
    config, cluster = settings.config, settings.cluster
    gpus = config.tensor_parallel_size if _on_gpus(config.device) else 0
    cpus = cluster.replica_cpus
    if cpus is None:
        share = (os.cpu_count() or 1) / cluster.most
        cpus = config.tensor_parallel_size if gpus else share if share < 1 else int(share)
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def _placed(settings: ClusterSettings) -> dict[str, Any]:
    """The same for Serve. The ranks of a divided model are on one node, since they share memory."""
    kept = reserved(settings)
    actor = {"num_cpus": kept["CPU"], "num_gpus": kept.get("GPU", 0)}
    if settings.config.tensor_parallel_size == 1:
        return {"ray_actor_options": actor}
    return {
        "ray_actor_options": actor,
        "placement_group_bundles": [kept],
        "placement_group_strategy": "STRICT_PACK",
    }


def _on_gpus(device: str) -> bool:
    """Whether engines compute on GPUs; `auto` asks the cluster, which need not be this machine."""
    if device != "auto":
        return device == "cuda"
    return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)
