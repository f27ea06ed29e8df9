"""The Verifier deployment: owns the target's workers and hands out its slots."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace

import ray
from ray import serve

from deployments.model_replica import ModelReplica
from deployments.replicas import QUIET, SERVE_NAMESPACE, Lease, ReplicaDescription
from deployments.specs import VerifierSpec
from deployments.workers import VerifierWorker

ROUTERS_POLL_S = 2.0


class VerifierReplica(ModelReplica):
    """Attributes:

    slots: the free ones. A None among them says that there will be no more: the workers died.
    leases: of every Router, the ends of those that it holds or waits for.
    """

    async def __init__(self, spec: VerifierSpec) -> None:
        await super().__init__(spec, VerifierWorker)
        self.slots: asyncio.Queue[int | None] = asyncio.Queue()
        for slot in range(spec.shapes.num_slots):
            self.slots.put_nowait(slot)
        self.leases: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.group.lost.add_done_callback(lambda _: self._end_all_leases())
        self.watch = asyncio.get_running_loop().create_task(self._watch_routers())

    async def lease(self, router: str, request_id: str) -> AsyncIterator[Lease]:
        """Wait in line for a slot, yield it, and keep it until the caller ends the stream.

        One open stream per request is what Serve needs to see load, to drain a replica before it
        is removed, and to tell a Router at once that the replica has died.

        Args:
            router: replica id of the caller; a lease ends with it, too.
            request_id: for whoever looks at Serve's logs.

        Raises:
            ReplicaLost: the workers are dead, or die.
        """
        ended = asyncio.Event()
        self.leases[router].add(ended)
        try:
            slot = await self.slots.get()
            try:
                self.require_workers()
                yield Lease(self.replica_id, slot)
                await ended.wait()
                self.require_workers()
            finally:
                self.slots.put_nowait(slot)
        finally:
            self.leases[router].discard(ended)

    async def describe(self) -> ReplicaDescription:
        return replace(await super().describe(), free_slots=self.slots.qsize())

    def _end_all_leases(self) -> None:
        self.slots.put_nowait(None)  # wakes those that wait, one after the other
        for leases in self.leases.values():
            _end(leases)

    async def _watch_routers(self) -> None:
        """A Router that was killed cannot end its leases."""
        while True:
            await asyncio.sleep(ROUTERS_POLL_S)
            for router, leases in list(self.leases.items()):
                if not leases:
                    del self.leases[router]
                elif not await asyncio.to_thread(_is_alive, router):
                    await asyncio.sleep(ROUTERS_POLL_S)  # its last step may still be running
                    _end(leases)


def _end(leases: set[asyncio.Event]) -> None:
    for ended in leases:
        ended.set()


def _is_alive(replica_id: str) -> bool:
    try:
        ray.get_actor(replica_id, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


Verifier = serve.deployment(name="Verifier", logging_config=QUIET)(VerifierReplica)
