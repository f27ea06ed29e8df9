"""The Drafter deployment: owns the draft model's workers."""

from __future__ import annotations

from ray import serve

from deployments.model_replica import ModelReplica
from deployments.replicas import QUIET
from deployments.specs import DrafterSpec
from deployments.workers import DrafterWorker


class DrafterReplica(ModelReplica):
    async def __init__(self, spec: DrafterSpec) -> None:
        await super().__init__(spec, DrafterWorker)


Drafter = serve.deployment(name="Drafter", logging_config=QUIET)(DrafterReplica)
