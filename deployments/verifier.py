"""The Verifier deployment: owns the target's workers and hands out its slots.

It is not on the hot path: Routers drive the workers through a compiled graph of their own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from ray import serve

from deployments.replicas import QUIET, Lease, ReplicaDescription
from deployments.specs import VerifierSpec
from deployments.worker_group import WorkerGroup
from deployments.workers import VerifierWorker


class VerifierReplica:
    async def __init__(self, spec: VerifierSpec) -> None:
        self.spec = spec
        self.replica_id = serve.get_replica_context().replica_id.to_full_id_str()
        self.slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(spec.shapes.num_slots):
            self.slots.put_nowait(slot)
        self.group = await WorkerGroup.start(VerifierWorker, spec, self.replica_id)

    async def lease(self, request_id: str) -> AsyncIterator[Lease]:
        """Wait in line for a slot, yield it, and keep it until the caller ends the stream.

        One open stream per request is what Serve needs to see load, to drain a replica before it
        is removed, and to tell a Router at once that the replica has died.
        """
        slot = await self.slots.get()
        try:
            yield Lease(self.replica_id, slot)
            await asyncio.get_running_loop().create_future()
        finally:
            self.slots.put_nowait(slot)

    async def describe(self) -> ReplicaDescription:
        return ReplicaDescription(
            replica_id=self.replica_id,
            pid=os.getpid(),
            workers=tuple(self.group.names),
            worker_pids=tuple(self.group.pids),
            slots=self.spec.shapes.num_slots,
            free_slots=self.slots.qsize(),
        )

    def record_replica_metadata(self) -> dict[str, list[str]]:
        return {"workers": self.group.names}

    async def check_health(self) -> None:
        await self.group.check()

    def __del__(self) -> None:
        if hasattr(self, "group"):
            self.group.kill()


Verifier = serve.deployment(name="Verifier", logging_config=QUIET)(VerifierReplica)
