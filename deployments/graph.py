"""One Ray compiled graph: a plan goes to every rank of a replica, rank 0's answer comes back."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

import ray
from ray.dag import DAGContext, InputNode, MultiOutputNode
from ray.exceptions import GetTimeoutError, RayActorError, RayChannelError

from deployments import channel_wait
from deployments.worker_group import NAMESPACE

Result = TypeVar("Result")

STEP_TIMEOUT_S = 60.0  # a worker that is still at a step after that is as good as dead


class WorkerLost(Exception):
    """A worker of the graph died or did not answer in time; the graph is of no more use."""


class ModelGraph(Generic[Result]):
    """Drives the workers of one replica. Used by one thread at a time.

    Args:
        workers: actor names in rank order.
        method: the worker's method, called with each plan.
        channel_bytes: buffer for plans; a larger message would resize the channel, which breaks
            the graph's teardown in Ray 2.60.

    Raises:
        ValueError: an actor is gone.
        ray.exceptions.RayError: the graph cannot be set up.
    """

    def __init__(self, workers: tuple[str, ...], method: str, channel_bytes: int) -> None:
        channel_wait.install()
        DAGContext.get_current().buffer_size_bytes = channel_bytes
        self.workers = [ray.get_actor(name, namespace=NAMESPACE) for name in workers]
        with InputNode() as plan:
            outputs = [getattr(worker, method).bind(plan) for worker in self.workers]
            graph = MultiOutputNode(outputs)
        self._graph = graph.experimental_compile(_max_inflight_executions=2)

    def run(self, plan: Any, timeout: float) -> Result:
        """Execute one plan and wait for its result.

        Arrays of the result lie in shared memory and pin a slot of the channel: copy what is kept,
        drop the rest before the next run.

        Raises:
            WorkerLost: a worker died, or there is no result within `timeout` seconds.
            Exception: what the worker's method raised; the graph stays usable.
        """
        try:
            return ray.get(self._graph.execute(plan), timeout=timeout)[0]
        except (RayActorError, RayChannelError, GetTimeoutError) as error:
            raise WorkerLost(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Tear the graph down, in a thread of its own: a dead worker can hold teardown up."""
        threading.Thread(target=self._graph.teardown, daemon=True).start()
