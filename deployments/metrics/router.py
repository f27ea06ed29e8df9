"""The metrics of a Router: answers scrapes, feeds Ray's metrics, checks that speculation pays."""

from __future__ import annotations

import asyncio
import logging

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.coordinator import Coordinator
from deployments.metrics.figures import RollCall, Snapshot
from deployments.metrics.prometheus_text import metrics_text
from deployments.metrics.ray_metrics import RayMetrics
from deployments.metrics.speculation_check import SpeculationCheck

logger = logging.getLogger("ray.serve")

UPDATE_S = 1.0
ROLL_CALL_TIMEOUT_S = 5.0


class RouterMetrics:
    """Lives in a Router replica, on its event loop, off the path of tokens.

    Args:
        coordinator: whose figures these are.
        model_name: label of all series.
        num_drafts: K; 0 = no speculation.
        groups: that running requests are split into.
    """

    def __init__(
        self, coordinator: Coordinator, *, model_name: str, num_drafts: int, groups: int
    ) -> None:
        self._coordinator = coordinator
        self._model_name = model_name
        self._num_drafts = num_drafts
        self._roll_call = RollCall()
        self._routers: DeploymentHandle | None = None
        self._ray_metrics = RayMetrics()
        self._check = SpeculationCheck(
            lambda running: coordinator.fleet.step_costs.break_even(running, groups)
        )
        self._task = asyncio.get_running_loop().create_task(self._keep_up())

    async def text(self) -> bytes:
        """The answer to `GET /metrics`, for all Routers together."""
        counters, gauges = self._roll_call.total(await self._reports())
        return metrics_text(
            counters, gauges, model_name=self._model_name, num_drafts=self._num_drafts
        )

    def report(self) -> list[Snapshot]:
        """What this Router can tell the one that is being scraped."""
        return self._roll_call.report(self._coordinator.figures())

    def close(self) -> None:
        self._task.cancel()

    async def _reports(self) -> list[list[Snapshot]]:
        own = self.report()
        try:
            if self._routers is None:
                context = serve.get_replica_context()
                # In a thread: it asks Serve's controller, and waits for the answer.
                self._routers = await asyncio.to_thread(
                    serve.get_deployment_handle, context.deployment, context.app_name
                )
            broadcast = self._routers.broadcast("metrics_report")
            answers = await broadcast.results_async(timeout_s=ROLL_CALL_TIMEOUT_S)
        except Exception:
            logger.exception("the other Routers cannot be asked; a scrape shows their last figures")
            return [own]
        reports = [answer for answer in answers if isinstance(answer, list)]
        # Serve may not name this Router yet, or not any more.
        answered = {report[0].router for report in reports}
        return reports if own[0].router in answered else [own, *reports]

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(UPDATE_S)
            try:
                await self._update()
            except Exception:
                logger.exception("bringing Ray's metrics up to date failed; trying again")

    async def _update(self) -> None:
        snapshot = self._coordinator.figures()
        counters, gauges = snapshot.counters, snapshot.gauges
        await asyncio.to_thread(
            self._ray_metrics.update, counters, gauges, self._coordinator.requests
        )
        if self._num_drafts and gauges.verifiers:
            self._check.observe(counters.acceptance, gauges.running / gauges.verifiers)
