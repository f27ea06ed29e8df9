"""Generation in one process: the reference that the served system is measured against.

The same models, plans, sequences and stopping rules as the Ray Serve application, without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dflash_core import plans
from dflash_core.drafter_runner import DrafterRunner
from dflash_core.sequence import Sequence
from dflash_core.statistics import AcceptanceStatistics
from dflash_core.stopping import Stopping
from dflash_core.target_runner import TargetRunner


@dataclass(frozen=True)
class Generation:
    """Output of one prompt."""

    token_ids: list[int]
    text: str
    finish_reason: str
    statistics: AcceptanceStatistics


def generate(
    target: TargetRunner,
    drafter: DrafterRunner | None,
    prompts: list[list[int]],
    make_stopping: Callable[[list[int]], Stopping],
) -> list[Generation]:
    """Generation for any number of prompts, batched over the target's slots.

    Args:
        target: the verifier.
        drafter: None for the plain baseline.
        prompts: token ids, each shorter than `max_model_len`.
        make_stopping: the request of a prompt: its sampling parameters and where its output ends.

    Returns:
        One Generation per prompt, in order.
    """
    shapes = target.shapes
    waiting = deque(enumerate(prompts))
    free_slots = list(range(shapes.num_slots))[::-1]
    running: dict[int, Sequence] = {}
    texts: dict[int, list[str]] = {}
    done: dict[int, Generation] = {}
    while waiting or running:
        while waiting and free_slots:
            index, prompt = waiting.popleft()
            sequence = Sequence(
                prompt,
                slot=free_slots.pop(),
                stopping=make_stopping(prompt),
                max_model_len=shapes.max_model_len,
            )
            if drafter is not None:
                sequence.attach_drafter(sequence.slot)
            running[index], texts[index] = sequence, []
        prefilling = [i for i, sequence in running.items() if sequence.prefilling]
        step = prefilling[:1] or list(running)
        sequences = [running[i] for i in step]
        plan, blocks = plans.verify_plan(sequences, shapes, with_features=drafter is not None)
        outputs = plans.commit(sequences, blocks, target.verify(plan))
        for i, output in zip(step, outputs, strict=True):
            if output is not None:
                texts[i].append(output.text)
                if output.finish_reason is not None:
                    sequence = running.pop(i)
                    free_slots.append(sequence.slot)
                    done[i] = Generation(
                        sequence.tokens[len(prompts[i]) :],
                        "".join(texts[i]),
                        output.finish_reason,
                        sequence.statistics,
                    )
        if drafter is not None:
            draft(drafter, [sequence for sequence in sequences if not sequence.finished])
    return [done[i] for i in range(len(prompts))]


def draft(drafter: DrafterRunner, sequences: list[Sequence]) -> None:
    """Inject the sequences' new features and give each its drafts."""
    jobs = [(sequence, sequence.take_draft_job()) for sequence in sequences]
    jobs = [(sequence, job) for sequence, job in jobs if job is not None]
    if not jobs:
        return
    steps = plans.draft_plans(
        [job for _, job in jobs],
        num_drafts=drafter.shapes.num_drafts,
        max_rows=drafter.shapes.max_draft_rows,
    )
    for plan in steps:
        result = drafter.draft(plan)
    asked = [(sequence, job) for sequence, job in jobs if job.token is not None]
    for (sequence, job), drafts in zip(asked, result.tokens, strict=True):
        sequence.offer_drafts(job.start, drafts)
