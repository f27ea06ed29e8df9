"""The thread that drives one Drafter: gather questions, inject, draft, answer."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from deployments.graph import ModelGraph, WorkerLost
from deployments.metrics.stage import StageTimes
from deployments.specs import DrafterSpec
from deployments.stream import Stream
from dflash_core import plans
from dflash_core.messages import DraftResult
from dflash_core.sequence import DraftJob

if TYPE_CHECKING:
    from deployments.verify_loop import VerifyLoop

logger = logging.getLogger("ray.serve")

STEP_TIMEOUT_S = 60.0

Question = tuple["VerifyLoop", Stream, DraftJob]


class DraftLoop:
    """Batches the questions of any number of Verifiers for one Drafter replica.

    Args:
        replica_id: of the Drafter.
        graph: compiled graph to its workers, warmed up.
        spec: of the Drafter.
        on_lost: called once, from this thread, when the Drafter is lost.

    Attributes:
        stage: sums over all steps.
        ended: whether they have their final values.
    """

    def __init__(
        self,
        replica_id: str,
        graph: ModelGraph[DraftResult],
        spec: DrafterSpec,
        *,
        on_lost: Callable[[DraftLoop], None],
    ) -> None:
        self.replica_id = replica_id
        self.graph = graph
        self.shapes = spec.shapes
        self.on_lost = on_lost
        self.stage = StageTimes()
        self.lost = False
        self._last_answer_s = 0.0
        self._questions: queue.SimpleQueue[list[Question] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"draft {replica_id}", daemon=True)
        self._thread.start()

    # Called from other threads.

    def submit(self, verifier: VerifyLoop, jobs: list[tuple[Stream, DraftJob]]) -> None:
        """Ask for drafts (or just injection); answers go to `verifier.drafted`."""
        self._questions.put([(verifier, stream, job) for stream, job in jobs])

    def patience(self, timeout: float) -> float:
        """Seconds that waiting for an answer is worth: nothing when the last one took too long."""
        return timeout if self._last_answer_s <= timeout else 0.0

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the thread and the graph."""
        self._questions.put(None)

    # The thread.

    def _run(self) -> None:
        while True:
            questions = self._gather()
            if questions is None or self.lost:
                break
            try:
                self._answer(questions)
            except WorkerLost as error:
                logger.error("drafter %s is lost: %s", self.replica_id, error)
                self.lost = True
                self.on_lost(self)
                break
            except Exception:
                logger.exception("drafter %s: a step failed", self.replica_id)
                for verifier in {question[0] for question in questions}:
                    verifier.draft_failed(
                        self, [stream for owner, stream, _ in questions if owner is verifier]
                    )
        self.graph.close()

    def _gather(self) -> list[Question] | None:
        """All questions that wait, at least one; None to end."""
        questions = self._questions.get()
        while questions is not None and not self._questions.empty():
            more = self._questions.get()
            if more is None:
                return None
            questions.extend(more)
        if questions is None:
            return None
        # The slot of a request that is gone may have a new owner already.
        return [question for question in questions if not question[1].removed]

    def _answer(self, questions: list[Question]) -> None:
        if not questions:
            return
        jobs = [job for _, _, job in questions]
        steps = plans.draft_plans(
            jobs, num_drafts=self.shapes.num_drafts, max_rows=self.shapes.max_draft_rows
        )
        first = time.monotonic()
        for plan in steps:
            began = time.monotonic()
            result = self.graph.run(plan, STEP_TIMEOUT_S)
            self.stage.record(
                span=result.span,
                began=began,
                received=time.monotonic(),
                rows=len(plan.row_slots),
                feature_bytes=plan.features.data.nbytes if plan.features is not None else 0,
            )
        asked = [question for question in questions if question[2].token is not None]
        if not asked:
            return
        self._last_answer_s = time.monotonic() - first
        self._reply(
            [(*question, drafts) for question, drafts in zip(asked, result.tokens, strict=True)]
        )

    def _reply(self, answers: list[tuple[VerifyLoop, Stream, DraftJob, list[int]]]) -> None:
        for verifier in {answer[0] for answer in answers}:
            drafts = [
                (stream, job.start, tokens)
                for owner, stream, job, tokens in answers
                if owner is verifier
            ]
            verifier.drafted(self, drafts)
