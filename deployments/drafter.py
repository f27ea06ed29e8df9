"""The Drafter deployment: owns the draft model's workers. Not on the hot path."""

from __future__ import annotations

import os

from ray import serve

from deployments.replicas import QUIET, ReplicaDescription
from deployments.specs import DrafterSpec
from deployments.worker_group import WorkerGroup
from deployments.workers import DrafterWorker


class DrafterReplica:
    async def __init__(self, spec: DrafterSpec) -> None:
        self.spec = spec
        self.replica_id = serve.get_replica_context().replica_id.to_full_id_str()
        self.group = await WorkerGroup.start(DrafterWorker, spec, self.replica_id)

    async def describe(self) -> ReplicaDescription:
        return ReplicaDescription(
            replica_id=self.replica_id,
            pid=os.getpid(),
            workers=tuple(self.group.names),
            worker_pids=tuple(self.group.pids),
            slots=self.spec.shapes.num_slots,
        )

    def record_replica_metadata(self) -> dict[str, list[str]]:
        return {"workers": self.group.names}

    async def check_health(self) -> None:
        await self.group.check()

    def __del__(self) -> None:
        if hasattr(self, "group"):
            self.group.kill()


Drafter = serve.deployment(name="Drafter", logging_config=QUIET)(DrafterReplica)
