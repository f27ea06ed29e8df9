"""The model replicas that a Router knows: found, connected, paired, and dropped when gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.backoff import Backoff
from deployments.connection import open_drafter, open_verifier
from deployments.draft_loop import DraftLoop
from deployments.health import Health
from deployments.metrics.figures import Counters
from deployments.metrics.step_costs import StepCosts
from deployments.metrics.timeline import Timeline
from deployments.replicas import ReplicaDescription
from deployments.scheduler import Scheduler
from deployments.specs import DrafterSpec, VerifierSpec
from deployments.verify_loop import VerifyLoop

Loop = TypeVar("Loop", VerifyLoop, DraftLoop)

logger = logging.getLogger("ray.serve")

POLL_S = 1.0
ANSWER_TIMEOUT_S = 5.0
DRAFTER_GRACE_S = 60.0  # that a new Router waits for a Drafter before it goes without


class Fleet:
    """Keeps one VerifyLoop per Verifier replica and one DraftLoop per Drafter replica.

    Serve is asked for the replicas every second. One that is no longer named is draining or dead:
    its loop goes on until its requests are done, and gets no new ones. Runs on the Router's event
    loop.

    Args:
        verifiers, drafters: handles of the deployments; no drafters for the baseline.
        verifier_spec, drafter_spec: what their workers run.
        vocab_size: of the target.
        draft_timeout: seconds that a request waits for drafts.
        groups: see Scheduler.
        adaptive: choose the number of drafts by what is fastest.

    Attributes:
        step_costs: measured on the replicas that were connected last.
        timeline: of all loops.
    """

    def __init__(
        self,
        verifiers: DeploymentHandle,
        drafters: DeploymentHandle | None,
        verifier_spec: VerifierSpec,
        drafter_spec: DrafterSpec | None,
        *,
        vocab_size: int,
        draft_timeout: float,
        groups: int,
        adaptive: bool,
    ) -> None:
        self._verifier_handle = verifiers
        self._drafter_handle = drafters
        self._verifier_spec = verifier_spec
        self._drafter_spec = drafter_spec
        self._vocab_size = vocab_size
        self._draft_timeout = draft_timeout
        self._groups = groups
        self._adaptive = adaptive
        self.verifiers: dict[str, VerifyLoop] = {}
        self.drafters: dict[str, DraftLoop] = {}
        self.descriptions: dict[str, ReplicaDescription] = {}
        self.step_costs = StepCosts()
        self.timeline = Timeline()
        self._ending: list[VerifyLoop | DraftLoop] = []
        self._ended = Counters()
        self._backoffs: dict[str, Backoff] = {}
        self._refreshing = asyncio.Lock()
        self._tasks: set[asyncio.Task] = set()
        self._began = time.monotonic()
        self._has_speculated = False
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._poll())

    def health(self) -> Health:
        """Ready when a Verifier and, where one is configured, a Drafter are.

        Without a Drafter that it once had, or has waited for long enough, the application is
        degraded: it answers everything, just not as fast.
        """
        if not self.verifiers:
            return Health("unavailable", "no Verifier is ready yet")
        if self._drafter_handle is None:
            return Health("ready")
        if any(verifier.drafter is not None for verifier in self.verifiers.values()):
            self._has_speculated = True
            return Health("ready")
        if self._has_speculated or time.monotonic() - self._began > DRAFTER_GRACE_S:
            return Health("degraded", "no Drafter is ready: requests run without speculation")
        return Health("unavailable", "no Drafter is ready yet")

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
        """Bring the loops in line with the replicas that Serve names.

        That goes on to its end also where the one who asked is cancelled.
        """
        await asyncio.shield(self._start(self._refresh()))

    def close(self) -> None:
        """End all loops."""
        self._task.cancel()
        for loop in [*self.verifiers.values(), *self.drafters.values()]:
            loop.close()

    async def _refresh(self) -> None:
        async with self._refreshing:
            self._forget_ended()
            verifiers = await self._describe(self._verifier_handle)
            drafters = await self._describe(self._drafter_handle)
            self.descriptions = verifiers | drafters
            for known in self._backoffs.keys() - self.descriptions.keys():
                del self._backoffs[known]
            for description in drafters.values():
                await self._connect(description, self.drafters, self._open_drafter)
            for description in verifiers.values():
                await self._connect(description, self.verifiers, self._open_verifier)
            for replica_id, loop in list(self.verifiers.items()):
                if loop.lost or (replica_id not in verifiers and not loop.streams):
                    self._drop_verifier(loop)
            for replica_id, loop in list(self.drafters.items()):
                if loop.lost or replica_id not in drafters:
                    self._drop_drafter(loop)
            await self._pair()

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
            answers = handle.broadcast("describe")
            found = await answers.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return {}
        return {
            description.replica_id: description
            for description in found
            if isinstance(description, ReplicaDescription)
        }

    async def _connect(
        self,
        description: ReplicaDescription,
        loops: dict[str, Loop],
        open_loop: Callable[[ReplicaDescription], Loop],
    ) -> None:
        if description.replica_id in loops:
            return
        backoff = self._backoffs.setdefault(description.replica_id, Backoff())
        if not backoff.is_over():
            return
        try:
            loops[description.replica_id] = await asyncio.to_thread(open_loop, description)
        except Exception as error:
            backoff.begin()
            logger.warning(
                "cannot connect to %s, trying again in %.0f s: %s: %s",
                description.replica_id,
                backoff.seconds,
                type(error).__name__,
                error,
            )

    def _open_verifier(self, description: ReplicaDescription) -> VerifyLoop:
        graph, verify = open_verifier(description, self._verifier_spec)
        self.step_costs = replace(self.step_costs, verify=verify)
        return VerifyLoop(
            description.replica_id,
            graph,
            self._verifier_spec.shapes,
            Scheduler(self._groups),
            adaptive=self._adaptive,
            timeline=self.timeline,
            draft_timeout=self._draft_timeout,
            on_lost=lambda loop, reason: self._soon(self._lose_verifier, loop, reason),
        )

    def _open_drafter(self, description: ReplicaDescription) -> DraftLoop:
        assert self._drafter_spec is not None
        graph, draft = open_drafter(description, self._drafter_spec)
        self.step_costs = replace(self.step_costs, draft=draft)
        return DraftLoop(
            description.replica_id,
            graph,
            self._drafter_spec.shapes,
            vocab_size=self._vocab_size,
            timeline=self.timeline,
            on_lost=lambda loop, reason: self._soon(self._lose_drafter, loop, reason),
        )

    async def _pair(self) -> None:
        """Give every Verifier without one a Drafter, the least shared first."""
        for verifier in list(self.verifiers.values()):
            if verifier.drafter is not None or verifier.lost:
                continue
            sharing = {
                drafter: sum(other.drafter is drafter for other in self.verifiers.values())
                for drafter in self.drafters.values()
            }
            for drafter in sorted(sharing, key=sharing.__getitem__):
                first_slot = await self._attach(drafter, verifier)
                if first_slot is not None and not drafter.lost:
                    attached = verifier.attach(drafter, first_slot, self.step_costs)
                    await asyncio.wrap_future(attached)
                    break

    async def _attach(self, drafter: DraftLoop, verifier: VerifyLoop) -> int | None:
        """The Verifier's first slot on this Drafter; None where it has none to give."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await drafter.graph.workers[0].attach.remote(verifier.replica_id)
        except (TimeoutError, RayError) as error:
            logger.warning("drafter %s cannot be attached: %s", drafter.replica_id, error)
            return None

    def _lose_verifier(self, verifier: VerifyLoop, reason: str | None) -> None:
        self._drop_verifier(verifier)
        self._leave_alone(self._verifier_handle, verifier.replica_id, reason)

    def _lose_drafter(self, drafter: DraftLoop, reason: str | None) -> None:
        self._drop_drafter(drafter)
        self._leave_alone(self._drafter_handle, drafter.replica_id, reason)

    def _leave_alone(
        self, handle: DeploymentHandle | None, replica_id: str, reason: str | None
    ) -> None:
        """Connect again after a pause; if the replica is to blame, have it replaced meanwhile."""
        self._backoffs.setdefault(replica_id, Backoff()).begin()
        if reason is not None and handle is not None:
            self._start(self._condemn(handle, replica_id, reason))

    async def _condemn(self, handle: DeploymentHandle, replica_id: str, reason: str) -> None:
        try:
            answers = handle.broadcast("condemn", replica_id, reason)
            await answers.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
        except Exception as error:  # no replica, or none that answers: Serve will notice as well
            logger.warning("%s cannot be condemned: %s", replica_id, error)

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

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _soon(self, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(call, *args)


def _count(loop: VerifyLoop | DraftLoop, counters: Counters) -> None:
    if isinstance(loop, VerifyLoop):
        counters.acceptance.add(loop.statistics)
        counters.verify.add(loop.stage)
    else:
        counters.draft.add(loop.stage)
