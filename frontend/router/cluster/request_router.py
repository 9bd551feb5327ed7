"""Serve's request router for replicas."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

# As a module: Serve pickles this one by its content, and would copy what it imports by name.
from coppice.frontend.router.cluster import membership


class ReplicaRouter(RequestRouter):
    """Serve's request router for replicas: a call goes to the one that its first argument names.

    Which replica a prompt goes to is decided in the ingress (`frontend.router.choosing.policy`),
    with what only it knows; Serve is asked for a session with each replica, and tells who is there.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica that the call names; all for a call that names none."""
        if pending_request is None or not pending_request.args:
            return [candidate_replicas]
        name = pending_request.args[0]
        named = [each for each in candidate_replicas if each.replica_id.unique_id == name]
        if not named and not pending_request.future.done():
            # Without an answer Serve would ask again and again.
            pending_request.future.set_exception(LookupError(f"replica {name} is gone"))
        return [named or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Takes those that are to get requests; one that is to end is not among them."""
        super().update_replicas(replicas)
        membership.MEMBERSHIP.changed(frozenset(each.replica_id.unique_id for each in replicas))
