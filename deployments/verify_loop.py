"""The thread that drives one Verifier: schedule, verify, commit, ask for drafts, deliver."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from deployments.api.errors import InternalError
from deployments.draft_length import DraftLength
from deployments.draft_loop import DraftLoop
from deployments.graph import STEP_TIMEOUT_S, ModelGraph, WorkerLost
from deployments.metrics.stage import StageTimes
from deployments.metrics.step_costs import StepCosts
from deployments.metrics.timeline import Timeline
from deployments.replicas import ReplicaLost
from deployments.scheduler import Scheduler
from deployments.stream import Stream
from dflash_core import plans
from dflash_core.messages import Features, VerifyResult
from dflash_core.sequence import DraftJob
from dflash_core.shapes import StaticShapes
from dflash_core.statistics import AcceptanceStatistics

logger = logging.getLogger("ray.serve")

MIN_INJECTION = 64  # rows that are worth a step of a drafter that nobody asks for drafts


class VerifyLoop:
    """Continuous batching over the slots of one Verifier replica.

    Other threads talk to it by posting calls, which it runs between two steps; so its state needs
    no lock. When the thread has ended, calls run where they are made: none is lost.

    Args:
        replica_id: of the Verifier.
        graph: compiled graph to its workers, warmed up.
        shapes: its static shapes.
        scheduler: chooses each step's requests.
        draft_timeout: seconds that a request waits for its drafts before it goes on without.
        timeline: takes note of every step.
        adaptive: verify as many drafts as are worth it, see DraftLength; else all of them.
        on_lost: called once, from this thread, when the Verifier is given up, with the reason if
            it lies there.

    Attributes:
        statistics: of all requests, those that run included.
        stage: of all steps.
        ended: whether both have their final values.
    """

    def __init__(
        self,
        replica_id: str,
        graph: ModelGraph[VerifyResult],
        shapes: StaticShapes,
        scheduler: Scheduler,
        *,
        draft_timeout: float,
        adaptive: bool,
        timeline: Timeline,
        on_lost: Callable[[VerifyLoop, str | None], None],
    ) -> None:
        self.replica_id = replica_id
        self.graph = graph
        self.shapes = shapes
        self.scheduler = scheduler
        self.draft_timeout = draft_timeout
        self.adaptive = adaptive
        self.timeline = timeline
        self.on_lost = on_lost
        self.streams: list[Stream] = []
        self.statistics = AcceptanceStatistics()
        self.stage = StageTimes()
        self.lost = False
        self.drafter: DraftLoop | None = None
        self.draft_length: DraftLength | None = None
        self._first_draft_slot = 0
        self._drafting = False
        self._closed = False
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._posting = threading.Lock()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=f"verify {replica_id}", daemon=True)
        self._thread.start()

    # Called from other threads.

    def add(self, stream: Stream) -> None:
        """Run the stream to its end. It hears of ReplicaLost if that is not possible here."""
        self._post(lambda: self._add(stream))

    def remove(self, stream: Stream, then: Callable[[], None]) -> None:
        """Forget the stream, then call `then`: from there on no step touches its slot."""
        self._post(lambda: (self._remove(stream), then()))

    def attach(self, drafter: DraftLoop, first_slot: int, costs: StepCosts) -> Future[None]:
        """Speculate with this drafter, also for the requests that run already.

        The future is done when the next step will. `costs` are those of the two replicas.
        """
        attached: Future[None] = Future()
        attached.set_running_or_notify_cancel()  # from here on it cannot be cancelled any more
        self._post(lambda: attached.set_result(self._attach(drafter, first_slot, costs)))
        return attached

    def detach(self, drafter: DraftLoop) -> None:
        """Go on without this drafter."""
        self._post(lambda: self._detach(drafter))

    def drafted(
        self, drafter: DraftLoop, drafts: list[tuple[Stream, int, list[int]]], seconds: float
    ) -> None:
        """Take drafts: (stream, position of the token they follow, draft tokens), which took so
        long to make."""
        self._post(lambda: self._drafted(drafter, drafts, seconds))

    def draft_failed(self, drafter: DraftLoop, jobs: list[tuple[Stream, DraftJob]]) -> None:
        """Take note that a draft step failed: what it was to inject is missing."""
        self._post(lambda: self._draft_failed(drafter, jobs))

    @property
    def num_drafts(self) -> int:
        """Drafts per step at the moment."""
        if self.drafter is None:
            return 0
        return self.draft_length.num_drafts if self.draft_length else self.shapes.num_drafts

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the thread and the graph; requests that still run hear of ReplicaLost."""
        self._post(self._close)

    def _post(self, call: Callable[[], None]) -> None:
        with self._posting:
            if not self._over:
                self._calls.put(call)
                return
        call()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except Exception:
            logger.exception("verifier %s: the thread that drives it has failed", self.replica_id)
            self._lose(None)
        finally:
            self._closed = True
            with self._posting:
                self._over = True
            self._run_calls()
            self.graph.close()

    def _turn(self) -> None:
        now = time.monotonic()
        batch = self.scheduler.next_batch(self.streams, now, drafting=self._drafting)
        if not batch:
            self._wait(now)
            return
        try:
            self._step(batch)
        except WorkerLost as error:
            logger.error("verifier %s is lost: %s", self.replica_id, error)
            self._lose(str(error))
        except Exception:
            logger.exception("verifier %s: a step failed", self.replica_id)
            self._fail(batch, InternalError("The Verifier failed; its log has the details."))
        self._run_calls()

    def _lose(self, reason: str | None) -> None:
        self.lost = self._closed = True
        self._fail(list(self.streams), ReplicaLost(f"{self.replica_id} has been given up"))
        self.on_lost(self, reason)

    def _wait(self, now: float) -> None:
        """Sleep until a call comes or a request has waited long enough for its drafts."""
        due = [stream.drafts_due for stream in self.streams if stream.drafting]
        try:
            call = self._calls.get(timeout=max(0.0, min(due) - now) if due else None)
        except queue.Empty:
            return
        call()
        self._run_calls()

    def _run_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            call()

    def _step(self, batch: list[Stream]) -> None:
        sequences = [stream.sequence for stream in batch]
        for stream in batch:
            stream.last_step = self.stage.steps
        num_drafts = None
        if self.draft_length is not None and not sequences[0].prefilling:
            running = sum(not stream.sequence.prefilling for stream in self.streams)
            num_drafts = self.draft_length.choose(running)
            self._drafting = num_drafts > 0
        plan, blocks = plans.verify_plan(
            sequences,
            self.shapes,
            with_features=self.drafter is not None,
            num_drafts=num_drafts,
        )
        began = time.monotonic()
        result = self.graph.run(plan, STEP_TIMEOUT_S)
        received = time.monotonic()
        if result.features is not None:
            # The one copy on this side: the original pins a slot of the channel.
            result = replace(result, features=_owned(result.features))
        self.stage.record(
            span=result.span,
            began=began,
            received=received,
            rows=sum(map(len, blocks)),
            feature_bytes=result.features.data.nbytes if result.features is not None else 0,
        )
        self.timeline.step(
            "prefill" if plan.prefill else "verify",
            self.replica_id,
            result.span,
            began=began,
            received=received,
            requests=[stream.request_id for stream in batch],
            block_lengths=list(map(len, blocks)),
            emitted=list(map(len, result.tokens)),
        )
        if self.draft_length is not None and not plan.prefill:
            self.draft_length.observe_verify(len(batch), plan.tokens.shape[1], received - began)
            for block, emitted in zip(blocks, result.tokens, strict=True):
                self.draft_length.observe_acceptance(len(block) - 1, len(emitted) - 1)
        outputs = plans.commit(sequences, blocks, result)
        del result
        self._request_drafts(batch)
        for stream, output in zip(batch, outputs, strict=True):
            if output is not None:
                stream.deliver(output)
            if stream.sequence.finished:
                self._remove(stream)

    def _request_drafts(self, batch: list[Stream]) -> None:
        if self.drafter is None:
            return
        jobs = []
        for stream in batch:
            # One question at a time: until it is answered, features pile up in the sequence.
            if stream.sequence.finished or stream.drafting or stream.sequence.draft_slot is None:
                continue
            if not self._drafting and stream.sequence.num_pending_features < MIN_INJECTION:
                continue
            job = stream.sequence.take_draft_job(drafting=self._drafting)
            if job is not None:
                stream.drafting = job.token is not None
                jobs.append((stream, job))
        if jobs:
            due = time.monotonic() + self.drafter.patience(self.draft_timeout)
            for stream, _ in jobs:
                stream.drafts_due = due
            self.drafter.submit(self, jobs)

    def _add(self, stream: Stream) -> None:
        if self.lost or self._closed:
            stream.fail(ReplicaLost(f"{self.replica_id} has been given up"))
            return
        if self.drafter is not None:
            stream.sequence.attach_drafter(self._first_draft_slot + stream.sequence.slot)
        stream.sequence.statistics.total = self.statistics
        self.streams.append(stream)

    def _remove(self, stream: Stream) -> None:
        if stream.removed:
            return
        stream.removed = True
        stream.flush()
        if stream in self.streams:
            self.streams.remove(stream)

    def _attach(self, drafter: DraftLoop, first_slot: int, costs: StepCosts) -> None:
        self.drafter, self._first_draft_slot = drafter, first_slot
        self._drafting = True
        if self.adaptive:
            self.draft_length = DraftLength(self.shapes.block_lengths, costs, self.scheduler.groups)
        for stream in self.streams:
            stream.drafting = False
            stream.sequence.attach_drafter(first_slot + stream.sequence.slot)

    def _detach(self, drafter: DraftLoop) -> None:
        if self.drafter is not drafter:
            return
        self.drafter = self.draft_length = None
        self._drafting = False
        for stream in self.streams:
            stream.drafting = False
            stream.sequence.detach_drafter()

    def _drafted(
        self, drafter: DraftLoop, drafts: list[tuple[Stream, int, list[int]]], seconds: float
    ) -> None:
        if drafter is not self.drafter:
            return  # the answer of one that has been replaced
        if self.draft_length is not None:
            self.draft_length.observe_draft(len(drafts), seconds)
        late = []
        for stream, start, tokens in drafts:
            stream.drafting = False
            if not stream.removed and not stream.sequence.offer_drafts(start, tokens):
                late.append(stream)
        # A request that went on without waiting asks again, for where it is now.
        self._request_drafts(late)

    def _draft_failed(self, drafter: DraftLoop, jobs: list[tuple[Stream, DraftJob]]) -> None:
        if drafter is not self.drafter:
            return
        for stream, job in jobs:
            if job.token is not None:
                stream.drafting = False
            if not stream.removed:
                # The drafter's context has a hole: it starts anew with what comes next.
                stream.sequence.attach_drafter(self._first_draft_slot + stream.sequence.slot)

    def _fail(self, streams: list[Stream], error: Exception) -> None:
        for stream in streams:
            self._remove(stream)
            stream.fail(error)

    def _close(self) -> None:
        self._closed = True
        self._fail(list(self.streams), ReplicaLost(f"{self.replica_id} was closed"))


def _owned(features: Features) -> Features:
    return Features(np.array(features.data), features.rows, features.width, features.dtype)
