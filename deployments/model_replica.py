"""What the replicas of both model deployments do: own a group of workers, and answer for it."""

from __future__ import annotations

import logging
import os

from ray import serve
from ray.actor import ActorClass

from deployments.priority import yield_to_models
from deployments.replicas import ReplicaDescription, ReplicaLost
from deployments.specs import ModelSpec
from deployments.worker_group import WorkerGroup

logger = logging.getLogger("ray.serve")


class ModelReplica:
    """It is not on the hot path: Routers drive the workers through compiled graphs of their own.

    Args:
        spec: of the model.
        worker_class: actor class of its ranks.
    """

    async def __init__(self, spec: ModelSpec, worker_class: ActorClass) -> None:
        if spec.device == "cpu":
            yield_to_models()
        self.spec = spec
        self.replica_id = serve.get_replica_context().replica_id.to_full_id_str()
        self.condemned: str | None = None
        self.group = await WorkerGroup.start(worker_class, spec, self.replica_id)

    async def describe(self) -> ReplicaDescription:
        return ReplicaDescription(
            replica_id=self.replica_id,
            pid=os.getpid(),
            workers=tuple(self.group.names),
            worker_pids=tuple(self.group.pids),
            slots=self.spec.shapes.num_slots,
        )

    async def condemn(self, replica_id: str, reason: str) -> None:
        """A Router has found this replica, if the id is its own, to be of no use: have it
        replaced."""
        if replica_id == self.replica_id and self.condemned is None:
            logger.error("condemned by a Router: %s", reason)
            self.condemned = reason

    def record_replica_metadata(self) -> dict[str, list[str]]:
        return {"workers": self.group.names}

    async def check_health(self) -> None:
        """Called by Serve. A dead worker or a condemnation has the replica replaced at once."""
        if self.condemned is not None:
            self.group.kill()
            await self.group.lost
        await self.group.check()

    def require_workers(self) -> None:
        """Raises ReplicaLost when a worker has died."""
        if self.group.lost.done():
            raise ReplicaLost(f"a worker of {self.replica_id} has died")

    def __del__(self) -> None:
        if hasattr(self, "group"):
            self.group.kill()
