"""On a CPU the models come first.

A model's step takes all its threads, in lockstep: when one of them has to make room for a process
of Ray's for a millisecond, all of them wait. So whatever is not a model runs at the niceness that
Ray gives its workers by default, and the models at 0 (`RAY_worker_niceness=0`, see the Makefile):
on two cores that is a third more tokens per second. The Router only has work when a model has just
finished a step, so it still gets its turn.
"""

from __future__ import annotations

import contextlib
import os

import psutil

NICENESS = 15
# The raylet's children would inherit it, and an idle worker may become a model's.
EXCEPT = ("raylet", "ray::IDLE", "ray::VerifierRank", "ray::DrafterRank")


def yield_to_models(pid: int | None = None) -> None:
    """Lower the priority of a process, this one by default, with all its threads."""
    process = psutil.Process(pid)
    # Linux gives every thread a priority of its own; elsewhere a process has one.
    ids = [thread.id for thread in process.threads()] if psutil.LINUX else [process.pid]
    for each in ids:
        with contextlib.suppress(OSError):  # one that has ended meanwhile
            if os.getpriority(os.PRIO_PROCESS, each) < NICENESS:
                os.setpriority(os.PRIO_PROCESS, each, NICENESS)


def put_models_first() -> None:
    """Lower the priority of the Ray cluster that this process has started, but for the models."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            name = os.path.basename((process.cmdline() or [process.name()])[0])
            if not name.startswith(EXCEPT):
                yield_to_models(process.pid)
