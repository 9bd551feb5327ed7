"""What is chosen about a cluster, from the command line or from the arguments of a Serve app."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

from coppice.frontend.http.lora_modules import all_modules, check_names
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.text.model.options import TextOptions
from coppice.runtime.config import EngineConfig

# A server's requests come from many users: none may wait much longer than it would in order of
# arrival, and no prompt may delay the answers of others. A single user's batch has no such limits.
SERVER_DEFAULTS = {"overtaking": 0.15, "max_step_stretch": 2.5}

# Of an engine's options, those that its ingress must have, too. Requests say nothing of the others.
_ALIKE = (
    "model",
    "revision",
    "max_model_len",
    "enable_prefix_caching",
    "model_impl",
    "enable_lora",
)

#: See `ClusterSettings.kind`; it can be pickled.
Kind: TypeAlias = tuple[Hashable, ...]


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How many replicas there are, and what each gets.

    Each field's `metadata["help"]` is its help text on the command line. Raises ValueError with the
    name, the value and what is allowed.
    """

    replicas: int | None = _option(
        None,
        "run so many engines, each with its own cache, on Ray Serve, behind a router that knows "
        "what each has cached; see docs/scale.md; default: one engine, without Ray",
    )
    max_replicas: int | None = _option(
        None, "start more replicas, up to so many, while the load is high, and end them again"
    )
    replica_cpus: float | None = _option(
        None,
        "cores that Ray reserves for each replica, and threads that it computes with; default: "
        "an equal part of the machine's; 1 on GPUs",
    )
    ray_address: str | None = _option(
        None,
        "join this Ray cluster: HOST:PORT, or auto for one that runs on this machine; default: "
        "start Ray on this machine alone",
    )
    upscale_delay: float = _option(
        10.0, "seconds for which the load must ask for more replicas before there are more"
    )
    downscale_delay: float = _option(
        120.0, "seconds for which the load must ask for fewer replicas before there are fewer"
    )

    def __post_init__(self) -> None:
        if self.replicas is None:
            for name in ("max_replicas", "replica_cpus", "ray_address"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} needs replicas, which is not given; got {getattr(self, name)!r}"
                    )
            return
        if not _whole(self.replicas) or self.replicas < 1:
            raise ValueError(f"replicas must be an integer of at least 1, got {self.replicas!r}")
        most = self.max_replicas
        if most is not None and (not _whole(most) or most < self.replicas):
            raise ValueError(
                f"max_replicas must be an integer of at least {self.replicas}, which is replicas, "
                f"got {most!r}"
            )
        cpus = self.replica_cpus
        if cpus is not None and not (isinstance(cpus, int | float) and cpus > 0):
            raise ValueError(f"replica_cpus must be more than 0, got {cpus!r}")
        for name in ("upscale_delay", "downscale_delay"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or seconds < 0:
                raise ValueError(f"{name} must be at least 0 seconds, got {seconds!r}")

    @property
    def most(self) -> int:
        """The most replicas that there may be."""
        return self.max_replicas or self.replicas or 1


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Everything that replicas and ingress need to know; it can be pickled.

    Attributes:
        config, text, options: as those of a server of one engine.
        cluster: how many replicas.
        host, port: where the ingress listens.
        node: the address of the node on which it must run; None: Ray's head node.
        engines_at: the address at which engines take callers; None: that of their node.
        handed: the abstract Unix socket at which it gets its listening socket; None: it binds one.
    """

    config: EngineConfig
    text: TextOptions
    options: ServerOptions
    cluster: ClusterOptions
    host: str = "127.0.0.1"
    port: int = 8000
    node: str | None = None
    engines_at: str | None = None
    handed: str | None = None

    def __post_init__(self) -> None:
        if self.cluster.replicas is None:
            raise ValueError("replicas must be an integer of at least 1, got None")
        if self.config.kv_events_endpoint is not None:
            raise ValueError(
                "kv_events_endpoint can't be given with replicas, each of which would bind it; "
                f"the ingress's router hears the replicas without; got "
                f"{self.config.kv_events_endpoint!r}"
            )
        # Only the ingress finds these wrong, when an update has replaced the replicas already.
        for each in all_modules(self.options.lora_modules):
            try:
                check_names(each.name, each.base_model_name, self.served_names)
            except ValueError as error:
                raise ValueError(f"lora_modules: {each.name!r}: {error}") from error

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names by which requests ask for the model."""
        return self.options.served_model_name or (self.config.model,)

    @property
    def kind(self) -> Kind:
        """What must be equal for an ingress to send requests to a replica.

        It has a tokenizer of the model, and loads the adapters.
        """
        parts = (getattr(self.config, name) for name in _ALIKE)
        return (*parts, self.text.tokenizer, self.options.lora_modules)

    def of_ingress(self) -> ClusterSettings:
        """Those that the ingress needs. Serve replaces it with the replicas, whatever changes."""
        needed = {name: getattr(self.config, name) for name in _ALIKE}
        one = ClusterOptions(replicas=1)
        return replace(self, config=EngineConfig(**needed), cluster=one)

    def of_replica(self) -> ClusterSettings:
        """Those that a replica needs; neither keys nor certificates are among them."""
        kept = ("log_format", "log_level", "engine_timeout", "lora_modules", "served_model_name")
        options = ServerOptions(**{name: getattr(self.options, name) for name in kept})
        one = ClusterOptions(replicas=1)
        return ClusterSettings(self.config, self.text, options, one, engines_at=self.engines_at)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ClusterSettings:
        """Settings from names and values, those of the command line's long options.

        `model` is needed. Raises ValueError for an unknown name, and for a value as the dataclasses
        do; their checks name it.
        """
        left = dict(arguments)
        if not isinstance(left.get("model"), str):
            raise ValueError(f"model must be a folder, a hub id or demo, got {left.get('model')!r}")
        left.setdefault("replicas", 1)
        parts = [
            _taken(kind, left, defaults)
            for kind, defaults in (
                (EngineConfig, SERVER_DEFAULTS),
                (TextOptions, {}),
                (ServerOptions, {}),
                (ClusterOptions, {}),
            )
        ]
        host, port = left.pop("host", "0.0.0.0"), left.pop("port", 8000)
        if left:
            raise ValueError(f"{next(iter(left))} is no option of coppice serve; see its --help")
        if not isinstance(host, str):
            raise ValueError(f"host must be a name or an address, got {host!r}")
        if not _whole(port) or not 0 < port <= 65535:
            raise ValueError(f"port must be from 1 to 65535, got {port!r}")
        config, text, options, cluster = parts
        if options.lora_modules:
            config = replace(config, enable_lora=True)
        return cls(config, text, options, cluster, host, port)


def _taken(kind: Any, left: dict[str, Any], defaults: Mapping[str, Any]) -> Any:
    """A dataclass of what `left` has for it, which is taken out."""
    values = dict(defaults)
    for each in fields(kind):
        if each.name in left:
            value = left.pop(each.name)
            values[each.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)
