"""The model replicas that a Router knows: found, connected, paired, and dropped when gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.draft_loop import DraftLoop
from deployments.graph import ModelGraph
from deployments.metrics.figures import Counters
from deployments.metrics.step_costs import StepCosts, measure
from deployments.replicas import ReplicaDescription
from deployments.scheduler import Scheduler
from deployments.specs import DrafterSpec, VerifierSpec
from deployments.verify_loop import VerifyLoop
from dflash_core import plans
from dflash_core.messages import DraftResult, VerifyResult

logger = logging.getLogger("ray.serve")

POLL_S = 1.0
WARM_UP_TIMEOUT_S = 120.0


class Fleet:
    """Keeps one VerifyLoop per Verifier replica and one DraftLoop per Drafter replica.

    Serve is asked for the replicas every second. One that is no longer named is draining or dead:
    its loop goes on until its requests are done, and gets no new ones. Runs on the Router's event
    loop.

    Args:
        verifiers, drafters: handles of the deployments; no drafters for the baseline.
        verifier_spec, drafter_spec: what their workers run.
        draft_timeout: seconds that a request waits for drafts.
        groups: see Scheduler.

    Attributes:
        step_costs: measured on the replicas that were connected last.
    """

    def __init__(
        self,
        verifiers: DeploymentHandle,
        drafters: DeploymentHandle | None,
        verifier_spec: VerifierSpec,
        drafter_spec: DrafterSpec | None,
        *,
        draft_timeout: float,
        groups: int,
    ) -> None:
        self._verifier_handle = verifiers
        self._drafter_handle = drafters
        self._verifier_spec = verifier_spec
        self._drafter_spec = drafter_spec
        self._draft_timeout = draft_timeout
        self._groups = groups
        self.verifiers: dict[str, VerifyLoop] = {}
        self.drafters: dict[str, DraftLoop] = {}
        self.descriptions: dict[str, ReplicaDescription] = {}
        self.step_costs = StepCosts()
        self._ending: list[VerifyLoop | DraftLoop] = []
        self._ended = Counters()
        self._refreshing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._poll())

    def missing(self) -> str | None:
        """What a request would have to do without, of all that the configuration promises."""
        if not self.verifiers:
            return "no Verifier is ready yet"
        if self._drafter_handle is not None and not any(
            verifier.drafter is not None for verifier in self.verifiers.values()
        ):
            return "no Drafter is ready yet"
        return None

    async def verifier(self, replica_id: str) -> VerifyLoop | None:
        """The loop of that replica, connecting to it first if it is new; None if it is gone."""
        if replica_id not in self.verifiers:
            await self.refresh()
        return self.verifiers.get(replica_id)

    def counters(self) -> Counters:
        """Sums over all loops there ever were; the requests' part is empty."""
        counters = Counters()
        counters.add(self._ended)
        for loop in [*self.verifiers.values(), *self.drafters.values(), *self._ending]:
            _count(loop, counters)
        return counters

    async def refresh(self) -> None:
        """Bring the loops in line with the replicas that Serve names."""
        async with self._refreshing:
            self._forget_ended()
            verifiers = await self._describe(self._verifier_handle)
            drafters = await self._describe(self._drafter_handle)
            self.descriptions = verifiers | drafters
            for description in drafters.values():
                if description.replica_id not in self.drafters:
                    await self._connect(description, self._open_drafter)
            for description in verifiers.values():
                if description.replica_id not in self.verifiers:
                    await self._connect(description, self._open_verifier)
            for replica_id, loop in list(self.verifiers.items()):
                if loop.lost or (replica_id not in verifiers and not loop.streams):
                    self._drop_verifier(loop)
            for replica_id, loop in list(self.drafters.items()):
                if loop.lost or replica_id not in drafters:
                    self._drop_drafter(loop)
            await self._pair()

    def close(self) -> None:
        """End all loops."""
        self._task.cancel()
        for loop in [*self.verifiers.values(), *self.drafters.values()]:
            loop.close()

    async def _poll(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:
                logger.exception("looking for model replicas failed; trying again")
            await asyncio.sleep(POLL_S)

    async def _describe(self, handle: DeploymentHandle | None) -> dict[str, ReplicaDescription]:
        if handle is None:
            return {}
        try:
            found = await handle.broadcast("describe").results_async(timeout_s=5)
        except DeploymentUnavailableError:
            return {}
        return {
            description.replica_id: description
            for description in found
            if isinstance(description, ReplicaDescription)
        }

    async def _connect(
        self, description: ReplicaDescription, open_loop: Callable[[ReplicaDescription], Any]
    ) -> None:
        try:
            await asyncio.to_thread(open_loop, description)
        except Exception:
            logger.exception("cannot connect to replica %s", description.replica_id)

    def _open_verifier(self, description: ReplicaDescription) -> None:
        shapes = self._verifier_spec.shapes
        graph: ModelGraph[VerifyResult] = ModelGraph(
            description.workers, "verify", channel_bytes=self._verifier_spec.plan_bytes
        )
        graph.run(plans.scratch_verify_plan(shapes, 1, 1), WARM_UP_TIMEOUT_S)
        if self._drafter_spec is not None:
            plain, block = (
                measure(
                    graph,
                    {
                        size: plans.scratch_verify_plan(shapes, size, length)
                        for size in shapes.num_seqs_buckets
                    },
                )
                for length in (1, shapes.num_drafts + 1)
            )
            self.step_costs = replace(self.step_costs, plain=plain, block=block)
        self.verifiers[description.replica_id] = VerifyLoop(
            description.replica_id,
            graph,
            shapes,
            Scheduler(self._groups),
            draft_timeout=self._draft_timeout,
            on_lost=lambda loop: self._soon(self._drop_verifier, loop),
        )

    def _open_drafter(self, description: ReplicaDescription) -> None:
        spec = self._drafter_spec
        assert spec is not None
        graph: ModelGraph[DraftResult] = ModelGraph(
            description.workers, "draft", channel_bytes=spec.channel_bytes
        )
        graph.run(plans.scratch_draft_plan(spec.shapes, 1, None), WARM_UP_TIMEOUT_S)
        draft = measure(
            graph,
            {
                size: plans.scratch_draft_plan(spec.shapes, size, None)
                for size in spec.shapes.num_seqs_buckets
            },
        )
        self.step_costs = replace(self.step_costs, draft=draft)
        self.drafters[description.replica_id] = DraftLoop(
            description.replica_id,
            graph,
            spec,
            on_lost=lambda loop: self._soon(self._drop_drafter, loop),
        )

    async def _pair(self) -> None:
        """Give every Verifier without one a Drafter, the least shared first."""
        for verifier in self.verifiers.values():
            if verifier.drafter is not None or verifier.lost:
                continue
            sharing = {
                drafter: sum(other.drafter is drafter for other in self.verifiers.values())
                for drafter in self.drafters.values()
            }
            for drafter in sorted(sharing, key=sharing.__getitem__):
                worker = drafter.graph.workers[0]
                first_slot = await worker.attach.remote(verifier.replica_id)
                if first_slot is not None:
                    await asyncio.wrap_future(verifier.attach(drafter, first_slot))
                    break

    def _drop_verifier(self, verifier: VerifyLoop) -> None:
        if self.verifiers.get(verifier.replica_id) is not verifier:
            return
        del self.verifiers[verifier.replica_id]
        if verifier.drafter is not None and not verifier.drafter.lost:
            verifier.drafter.graph.workers[0].detach.remote(verifier.replica_id)
        verifier.close()
        self._ending.append(verifier)

    def _drop_drafter(self, drafter: DraftLoop) -> None:
        if self.drafters.get(drafter.replica_id) is not drafter:
            return
        del self.drafters[drafter.replica_id]
        for verifier in self.verifiers.values():
            verifier.detach(drafter)
        drafter.close()
        self._ending.append(drafter)

    def _forget_ended(self) -> None:
        """Keep of the loops that are over just what they have counted."""
        for loop in [loop for loop in self._ending if loop.ended]:
            self._ending.remove(loop)
            _count(loop, self._ended)

    def _soon(self, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(call, *args)


def _count(loop: VerifyLoop | DraftLoop, counters: Counters) -> None:
    if isinstance(loop, VerifyLoop):
        counters.acceptance.add(loop.statistics)
        counters.verify.add(loop.stage)
    else:
        counters.draft.add(loop.stage)
