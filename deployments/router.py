"""The Router deployment: HTTP ingress and coordinator of the accept/reject loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.api.api_key import load_api_keys
from deployments.api.openai_api import create_api
from deployments.app_args import AppArgs
from deployments.coordinator import Coordinator
from deployments.fleet import Fleet
from deployments.health import Health
from deployments.metrics.figures import Snapshot
from deployments.metrics.router import RouterMetrics
from deployments.priority import yield_to_models
from deployments.specs import DrafterSpec, VerifierSpec
from dflash_core.checkpoint import load_sampling_defaults, load_target_config, resolve
from dflash_core.request import GenerationOutput, GenerationRequest
from dflash_core.tokenizer import load_tokenizer

logger = logging.getLogger("ray.serve")


@serve.ingress()
class RouterReplica:
    """An Engine for the OpenAI API, on top of a Coordinator.

    Args:
        args: the application's arguments.
        verifier_spec, verifiers: the target's deployment.
        drafter_spec, drafters: the drafter's; None for the baseline.
    """

    async def __init__(
        self,
        args: AppArgs,
        verifier_spec: VerifierSpec,
        verifiers: DeploymentHandle,
        drafter_spec: DrafterSpec | None = None,
        drafters: DeploymentHandle | None = None,
    ) -> None:
        if args.device == "cpu":
            yield_to_models()
        folder = resolve(args.target.model, revision=args.target.revision)
        target = load_target_config(folder)
        speculation = args.speculation
        groups = speculation.pipeline_groups if speculation else 1
        self.api_keys = load_api_keys(args.api_key_env, args.api_key_file)
        self.cors_allow_origins = args.cors_allow_origins
        self.max_body_bytes = args.max_body_bytes
        self.tokenizer = load_tokenizer(folder)
        self.model_name = args.served_model_name or args.target.model
        self.model_root = str(folder)
        self.max_model_len = args.max_model_len
        self.max_token_chars = max(map(len, self.tokenizer.get_vocab()))
        self.vocab_size = target.vocab_size
        self.sampling_defaults = load_sampling_defaults(folder)
        self.all_greedy = args.all_greedy
        self.fleet = Fleet(
            verifiers,
            drafters,
            verifier_spec,
            drafter_spec,
            vocab_size=target.vocab_size,
            draft_timeout=speculation.draft_timeout_s if speculation else 0.0,
            groups=groups,
            adaptive=speculation.adaptive if speculation else False,
        )
        self.coordinator = Coordinator(
            serve.get_replica_context().replica_id.to_full_id_str(),
            self.fleet,
            verifiers,
            tokenizer=self.tokenizer,
            eos_token_ids=target.eos_token_ids,
            max_model_len=args.max_model_len,
            slots_per_verifier=args.max_num_seqs,
            max_queued_requests=args.max_queued_requests,
            request_timeout=args.request_timeout_s,
            stream_interval=args.stream_batching_interval_ms / 1e3,
        )
        self.router_metrics = RouterMetrics(
            self.coordinator,
            model_name=self.model_name,
            num_drafts=args.num_drafts,
            groups=groups,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve's proxy returns X-Request-Id itself.
        return create_api(
            self,
            echo_request_id=False,
            api_keys=self.api_keys,
            cors_allow_origins=self.cors_allow_origins,
            max_body_bytes=self.max_body_bytes,
        )

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        return self.coordinator.generate(request)

    async def health(self) -> Health:
        return self.fleet.health()

    async def stats(self) -> dict[str, Any]:
        return await self.coordinator.stats()

    async def trace(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.fleet.timeline.chrome_trace)

    async def metrics(self) -> bytes:
        return await self.router_metrics.text()

    async def metrics_report(self) -> list[Snapshot]:
        """Called by every Router that is being scraped, on all of them."""
        return self.router_metrics.report()

    def __del__(self) -> None:
        if hasattr(self, "coordinator"):
            logger.info(
                "speculation of this Router: %s", self.coordinator.counters()["speculation"]
            )
            self.router_metrics.close()
            self.fleet.close()


# Requests that wait are counted, and refused, by the Coordinator: Serve should let them through.
Router = serve.deployment(name="Router", max_ongoing_requests=10_000)(RouterReplica)
