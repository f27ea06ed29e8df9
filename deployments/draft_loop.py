"""The thread that drives one Drafter: gather questions, inject, draft, answer."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ray.exceptions import RayTaskError

from deployments.graph import STEP_TIMEOUT_S, ModelGraph, WorkerLost
from deployments.metrics.stage import StageTimes
from deployments.metrics.timeline import Timeline
from deployments.stream import Stream
from dflash_core import plans
from dflash_core.messages import DraftPlan, DraftResult
from dflash_core.sequence import DraftJob
from dflash_core.shapes import StaticShapes

if TYPE_CHECKING:
    from deployments.verify_loop import VerifyLoop

logger = logging.getLogger("ray.serve")

MAX_FAULTS = 3  # in a row; a drafter that goes on like that is of no use

Question = tuple["VerifyLoop", Stream, DraftJob]


class DrafterFault(Exception):
    """A step failed, or answered nonsense."""


class DraftLoop:
    """Batches the questions of any number of Verifiers for one Drafter replica.

    Args:
        replica_id: of the Drafter.
        graph: compiled graph to its workers, warmed up.
        shapes: its static shapes.
        vocab_size: of the target; drafts are below it.
        timeline: takes note of every step.
        on_lost: called once, from this thread, when the Drafter is given up, with the reason if
            it lies there.

    Attributes:
        stage: sums over all steps.
        ended: whether they have their final values.
    """

    def __init__(
        self,
        replica_id: str,
        graph: ModelGraph[DraftResult],
        shapes: StaticShapes,
        *,
        vocab_size: int,
        timeline: Timeline,
        on_lost: Callable[[DraftLoop, str | None], None],
    ) -> None:
        self.replica_id = replica_id
        self.graph = graph
        self.shapes = shapes
        self.vocab_size = vocab_size
        self.timeline = timeline
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
        faults = 0
        try:
            while (questions := self._gather()) is not None:
                try:
                    self._answer(questions)
                    faults = 0
                except DrafterFault as error:
                    faults += 1
                    if faults == MAX_FAULTS:
                        raise
                    logger.error("drafter %s: %s", self.replica_id, error)
                    self._report_failure(questions)
        except (WorkerLost, DrafterFault) as error:
            logger.error("drafter %s is given up: %s", self.replica_id, error)
            self._lose(str(error))
        except Exception:
            logger.exception("drafter %s: the thread that drives it has failed", self.replica_id)
            self._lose(None)
        finally:
            self.graph.close()

    def _lose(self, reason: str | None) -> None:
        self.lost = True
        self.on_lost(self, reason)

    def _report_failure(self, questions: list[Question]) -> None:
        for verifier in {question[0] for question in questions}:
            jobs = [(stream, job) for owner, stream, job in questions if owner is verifier]
            verifier.draft_failed(self, jobs)

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
            try:
                result = self.graph.run(plan, STEP_TIMEOUT_S)
            except RayTaskError as error:
                raise DrafterFault(f"a step failed: {error}") from error
            self._check(plan, result)
            received = time.monotonic()
            self.stage.record(
                span=result.span,
                began=began,
                received=received,
                rows=len(plan.row_slots),
                feature_bytes=plan.features.data.nbytes if plan.features is not None else 0,
            )
            self.timeline.step(
                "draft" if len(plan.tokens) else "inject",
                self.replica_id,
                result.span,
                began=began,
                received=received,
                requests=len(plan.tokens),
                injected=len(plan.row_slots),
            )
        asked = [question for question in questions if question[2].token is not None]
        if not asked:
            return
        self._last_answer_s = time.monotonic() - first
        answers = [
            (*question, drafts) for question, drafts in zip(asked, result.tokens, strict=True)
        ]
        self._reply(answers, self._last_answer_s)

    def _check(self, plan: DraftPlan, result: DraftResult) -> None:
        shape = [len(row) for row in result.tokens]
        if shape != [plan.num_drafts] * len(plan.tokens):
            raise DrafterFault(f"{len(plan.tokens)} x {plan.num_drafts} drafts expected: {shape}")
        if not all(0 <= token < self.vocab_size for row in result.tokens for token in row):
            raise DrafterFault(f"a draft is outside the vocabulary of {self.vocab_size} tokens")

    def _reply(
        self, answers: list[tuple[VerifyLoop, Stream, DraftJob, list[int]]], seconds: float
    ) -> None:
        for verifier in {answer[0] for answer in answers}:
            drafts = [
                (stream, job.start, tokens)
                for owner, stream, job, tokens in answers
                if owner is verifier
            ]
            verifier.drafted(self, drafts, seconds)
