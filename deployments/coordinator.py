"""The Router's engine: admits requests, leases slots, hands streams to the Verifiers' threads.

A request outlives its Verifier: what the client has got so far is computed again in a slot of
another one, as if it were part of the prompt, and the output goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.api.errors import NotReady, QueueFull, RequestTimeout
from deployments.fleet import Fleet
from deployments.metrics.figures import Gauges, Snapshot
from deployments.metrics.request_record import RequestFigures, RequestRecord
from deployments.replicas import Lease, ReplicaLost
from deployments.stream import Delivery, Stream
from deployments.verify_loop import VerifyLoop
from dflash_core.request import GenerationOutput, GenerationRequest
from dflash_core.sequence import Sequence
from dflash_core.stopping import Stopping

logger = logging.getLogger("ray.serve")

RECENT_REQUESTS = 100
MAX_LOSSES = 3
RETRY_S = 0.25
RECOVERY_S = 300.0  # that a replacement may need to load its model


class Coordinator:
    """Generates text with the replicas of a Fleet. Runs on the Router's event loop.

    Args:
        name: of this Router, unique in the application.
        fleet: the connected replicas.
        verifiers: handle through which slots are leased.
        tokenizer, eos_token_ids, max_model_len: of the target.
        slots_per_verifier: requests that run at once on one Verifier.
        max_queued_requests: requests that may wait for a slot; one more is refused.
        request_timeout: seconds from a request's arrival to its last token; None: any.
        stream_interval: seconds between two outputs of a request at least; tokens that come faster
            are put together.
    """

    def __init__(
        self,
        name: str,
        fleet: Fleet,
        verifiers: DeploymentHandle,
        *,
        tokenizer: Any,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        slots_per_verifier: int,
        max_queued_requests: int,
        request_timeout: float | None,
        stream_interval: float,
    ) -> None:
        self._name = name
        self.fleet = fleet
        self._leases = verifiers.options(stream=True)
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._slots_per_verifier = slots_per_verifier
        self._max_queued_requests = max_queued_requests
        self._request_timeout = request_timeout
        self._stream_interval = stream_interval
        self._loop = asyncio.get_running_loop()
        self._cleaning: set[asyncio.Task] = set()
        self.num_waiting = 0
        self.num_running = 0
        self.requests = RequestFigures()
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_REQUESTS)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        """Stream the outputs of one request; closing the iterator frees its slots.

        Raises:
            QueueFull: too many requests wait already.
            NotReady: no Verifier, for minutes, or several in a row were lost.
            RequestTimeout: the request's time is over.
            InternalError: a step failed.
        """
        with RequestRecord(self.requests, request) as record:
            async with contextlib.aclosing(self._generate(request, record)) as outputs:
                async for output in outputs:
                    record.add(output)
                    yield output

    async def _generate(
        self, request: GenerationRequest, record: RequestRecord
    ) -> AsyncGenerator[GenerationOutput, None]:
        slots = len(self.fleet.verifiers) * self._slots_per_verifier
        if self.num_waiting + self.num_running >= slots + self._max_queued_requests:
            raise QueueFull(
                f"all {slots} slots are taken and {self._max_queued_requests} requests may wait "
                "for one (max_queued_requests); try again later"
            )
        sequence = Sequence(
            request.prompt_token_ids,
            stopping=Stopping(
                self._tokenizer,
                request,
                eos_token_ids=self._eos_token_ids,
                max_model_len=self._max_model_len,
            ),
            max_model_len=self._max_model_len,
        )
        deadline = None
        if self._request_timeout is not None:
            deadline = self._loop.time() + self._request_timeout
        losses = 0  # without a token in between
        while True:
            async with self._until(deadline, "in the queue"):
                response, lease, verifier = await self._lease(request)
            record.admitted()
            before = sequence.num_output_tokens
            sequence = sequence.in_slot(lease.slot)
            try:
                async with contextlib.aclosing(
                    self._run(request.request_id, sequence, verifier, response, deadline)
                ) as outputs:
                    async for output in outputs:
                        yield output
                return
            except ReplicaLost as error:
                losses = 1 if sequence.num_output_tokens > before else losses + 1
                if losses == MAX_LOSSES:
                    raise NotReady(f"{losses} Verifiers in a row were lost: {error}") from error
                logger.warning(
                    "request %s goes on elsewhere, %d tokens are out: %s",
                    request.request_id,
                    sequence.num_output_tokens,
                    error,
                )

    async def _run(
        self,
        request_id: str,
        sequence: Sequence,
        verifier: VerifyLoop,
        response: DeploymentResponseGenerator,
        deadline: float | None,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """The outputs of a sequence on its Verifier; the lease, `response`, ends with them.

        Raises:
            ReplicaLost: the sequence has not finished; nothing changes it any more.
            RequestTimeout: nor did it by the deadline, a time of the event loop.
        """
        deliveries: asyncio.Queue[Delivery] = asyncio.Queue()

        def send(item: Delivery) -> None:
            if isinstance(item, GenerationOutput):
                self.fleet.timeline.delivery(request_id, len(item.token_ids))
            self._loop.call_soon_threadsafe(deliveries.put_nowait, item)

        stream = Stream(request_id, sequence, send, self._stream_interval)
        watch = self._loop.create_task(_watch(response, deliveries))
        self.num_running += 1
        try:
            verifier.add(stream)
            lost: ReplicaLost | None = None
            while lost is None or not deliveries.empty():
                async with self._until(deadline, f"after {sequence.num_output_tokens} tokens"):
                    item = await deliveries.get()
                if isinstance(item, ReplicaLost):
                    lost = lost or item
                    # A step may still be under way; what it brings is delivered before this ends.
                    await self._removed(verifier, stream)
                elif isinstance(item, Exception):
                    raise item
                else:
                    if item.finish_reason is not None:
                        self.recent.append({"id": request_id, **(item.statistics or {})})
                    yield item
                    if item.finish_reason is not None:
                        return
            raise lost
        finally:
            self.num_running -= 1
            # A task of its own, because this one may be being cancelled.
            cleaning = self._loop.create_task(self._release(verifier, stream, watch, response))
            self._cleaning.add(cleaning)
            cleaning.add_done_callback(self._cleaning.discard)

    @contextlib.asynccontextmanager
    async def _until(self, deadline: float | None, place: str) -> AsyncIterator[None]:
        """Raises RequestTimeout when what is awaited inside takes longer."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError as error:
            raise RequestTimeout(
                f"the request was not done within {self._request_timeout:g} seconds "
                f"(request_timeout_s); its time ended {place}"
            ) from error

    async def _lease(
        self, request: GenerationRequest
    ) -> tuple[DeploymentResponseGenerator, Lease, VerifyLoop]:
        """Wait in line for a slot of a Verifier that this Router is connected to.

        Raises NotReady when for a while nobody has any to offer.
        """
        self.num_waiting += 1
        refused_since = math.inf
        try:
            while True:
                response = self._leases.lease.remote(self._name, request.request_id)
                try:
                    lease = await anext(response)
                    # Serve leases a new replica's slots before every Router has heard of it.
                    verifier = await self.fleet.verifier(lease.replica_id)
                    if verifier is None:
                        raise ReplicaLost(f"there is no connection to {lease.replica_id}")
                    return response, lease, verifier
                except asyncio.CancelledError:
                    response.cancel()
                    raise
                except Exception as error:
                    response.cancel()
                    refused_since = min(refused_since, time.monotonic())
                    if time.monotonic() - refused_since > RECOVERY_S:
                        raise NotReady(f"no Verifier could take the request: {error}") from error
                await asyncio.sleep(RETRY_S)
        finally:
            self.num_waiting -= 1

    async def _release(
        self,
        verifier: VerifyLoop,
        stream: Stream,
        watch: asyncio.Task,
        response: DeploymentResponseGenerator,
    ) -> None:
        """Give the slot back, once no step can touch it any more."""
        try:
            await self._removed(verifier, stream)
        finally:
            watch.cancel()
            response.cancel()

    async def _removed(self, verifier: VerifyLoop, stream: Stream) -> None:
        """Take the stream from its Verifier's thread."""
        removed = asyncio.Event()
        verifier.remove(stream, lambda: self._loop.call_soon_threadsafe(removed.set))
        await removed.wait()

    def figures(self) -> Snapshot:
        """What this Router has measured. Reads without locks what the loops' threads write."""
        counters = self.fleet.counters()
        counters.requests.add(self.requests)
        gauges = Gauges(
            running=self.num_running,
            waiting=self.num_waiting,
            slots=len(self.fleet.verifiers) * self._slots_per_verifier,
            verifiers=len(self.fleet.verifiers),
            drafters=len(self.fleet.drafters),
            routers=1,
        )
        return Snapshot(self._name, time.monotonic(), counters, gauges)

    async def stats(self) -> dict[str, Any]:
        """Counters of this Router, with the replicas as they are now."""
        await self.fleet.refresh()
        return self.counters()

    def counters(self) -> dict[str, Any]:
        """Counters of this Router process, its loops and the replicas behind them."""
        verifiers, drafters = {}, {}
        for loop in self.fleet.verifiers.values():
            verifiers[loop.replica_id] = {
                "running": len(loop.streams),
                "drafter": loop.drafter.replica_id if loop.drafter is not None else None,
                "num_drafts": loop.num_drafts,
                "speculation": loop.statistics.as_dict(),
                "verify": loop.stage.as_dict(),
            }
        for loop in self.fleet.drafters.values():
            drafters[loop.replica_id] = {"draft": loop.stage.as_dict()}
        for replica_id, description in self.fleet.descriptions.items():
            for group in (verifiers, drafters):
                if replica_id in group:
                    group[replica_id]["replica"] = asdict(description)
        return {
            "router_pid": os.getpid(),
            "requests": {"running": self.num_running, "waiting": self.num_waiting},
            "speculation": self.figures().counters.acceptance.as_dict(),
            "recent_requests": list(self.recent),
            "verifiers": verifiers,
            "drafters": drafters,
        }


async def _watch(response: DeploymentResponseGenerator, deliveries: asyncio.Queue) -> None:
    """Keep the lease's stream open; a Verifier replica that dies ends it."""
    try:
        async for _ in response:
            pass
        reason = "its lease ended"
    except asyncio.CancelledError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}"
    deliveries.put_nowait(ReplicaLost(reason))
