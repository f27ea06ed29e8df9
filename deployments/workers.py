"""Worker actors: one process per rank of a model. They compute; they decide nothing."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import ray
import torch
from ray.dag import DAGContext

from deployments import channel_wait
from deployments.graph import STEP_TIMEOUT_S
from deployments.specs import DrafterSpec, ModelSpec, VerifierSpec
from dflash_core.checkpoint import resolve
from dflash_core.cpu.pinning import pin
from dflash_core.messages import DraftPlan, DraftResult, VerifyPlan, VerifyResult
from dflash_core.neuron.claims import claim_core
from dflash_core.nxd.installation import open_cores
from dflash_core.nxd.target_runner import NxdTargetRunner
from dflash_core.parallel import TensorParallel
from dflash_core.runtime import DTYPES, join_group, open_device, seal, set_compiler
from dflash_core.target_runner import TargetRunner

# One compiled graph keeps one thread of "_ray_system" busy, so this is the number of Routers that
# can drive a worker in its life, less those that ended in order: one that was killed leaves its
# thread behind, asleep. Only the class decorator accepts it.
MAX_ROUTERS = 16
CONCURRENCY = {"_ray_system": MAX_ROUTERS, "life": 1}
CORE_TIMEOUT_S = 30.0  # for the NeuronCore of a worker that is just ending

logger = logging.getLogger("ray.serve")


Plan = TypeVar("Plan")
Result = TypeVar("Result")


class StuckStep(Exception):
    """A step has been running for longer than any Router waits for one."""


class Rank:
    """What a rank of either model does besides its model's work. With `parallel: nxd` there is
    one, which drives all of the model's cores, `core` and those that follow.
    """

    def __init__(self, spec: ModelSpec, rank: int, core: int | None = None) -> None:
        self.spec = spec
        self.rank = rank
        self.core = core
        channel_wait.install()
        # Only rank 0 sends features or receives them alone; a large buffer costs shared memory.
        DAGContext.get_current().buffer_size_bytes = spec.channel_bytes if rank == 0 else 1 << 20
        # All of the model's work is done in one thread. Calls, and the graphs of several Routers,
        # come in threads of their own, and OpenMP would make a team of compute threads for each:
        # more than there are cores, whereupon none of them spins between two operations any more
        # (a step of the 135M target on two cores: 27 ms in one thread, 41 ms in a second one).
        self.model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.step_began: float | None = None

    def load(self, store_port: int) -> int:
        """Check the device, join the group, load this rank's slices, warm up.

        Args:
            store_port: where the ranks rendezvous.

        Returns:
            The process id.

        Raises:
            NeuronError: this node cannot run the rank.
            ValueError: it does not have the rank's CPU cores.
        """
        return self.model_thread.submit(self._load, store_port).result()

    def _load(self, store_port: int) -> int:
        spec = self.spec
        pinned = spec.rank_cores[self.rank : self.rank + spec.ranks_per_process]
        if None not in pinned:
            pin(frozenset().union(*pinned))
        if spec.neuron is not None:
            cores = range(self.core, self.core + spec.ranks_per_process)
            self.claims = [claim_core(core, CORE_TIMEOUT_S) for core in cores]
        if spec.nxd:
            device = torch.device("cpu")  # of what goes in and comes out
            tp = open_cores(cores, spec.neuron.logical_nc_config)
        else:
            lnc = (
                {} if spec.neuron is None else {"logical_nc_config": spec.neuron.logical_nc_config}
            )
            device = open_device(spec.device, core=self.core, **lnc)
            tp = join_group(spec.device, self.rank, spec.tensor_parallel_size, store_port)
        set_compiler(spec.compile)
        if spec.compile != "eager" or spec.neuron is not None:
            logging.basicConfig(level=logging.INFO)  # the warm-up takes minutes: show where it is
        self.runner = self.make_runner(tp, DTYPES[spec.dtype], device)
        self.runner.warm_up()
        seal(device)
        return os.getpid()

    def step(self, work: Callable[[Plan], Result], plan: Plan) -> Result:
        """One step of the model's work. Raises what it raises."""

        def timed() -> Result:
            self.step_began = time.monotonic()
            try:
                return work(plan)
            finally:
                self.step_began = None

        return self.model_thread.submit(timed).result()

    def ping(self) -> int:
        """The process id, also during a step. Raises StuckStep when that does not end."""
        began = self.step_began
        if began is not None and time.monotonic() - began > STEP_TIMEOUT_S:
            raise StuckStep(f"rank {self.rank}: a step runs for over {STEP_TIMEOUT_S:.0f} s")
        return os.getpid()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never returns: whoever waits for it learns at once that the process has died."""
        threading.Event().wait()


class VerifierRank(Rank):
    spec: VerifierSpec

    def make_runner(
        self, tp: TensorParallel, dtype: torch.dtype, device: torch.device
    ) -> TargetRunner:
        runner = NxdTargetRunner if self.spec.nxd else TargetRunner
        return runner.load(
            resolve(self.spec.model, revision=self.spec.revision),
            self.spec.shapes,
            tapped_layers=self.spec.tapped_layers,
            dtype=dtype,
            device=device,
            tp=tp,
        )

    def verify(self, plan: VerifyPlan) -> VerifyResult | None:
        """One step. Every rank takes part, rank 0 answers."""
        result = self.step(self.runner.verify, plan)
        return result if self.rank == 0 else None


class DrafterRank(Rank):
    spec: DrafterSpec

    def __init__(self, spec: DrafterSpec, rank: int, core: int | None = None) -> None:
        super().__init__(spec, rank, core)
        places = spec.shapes.num_slots // spec.slots_per_verifier
        self.free_places = list(range(places))[::-1]
        self.places: dict[str, int] = {}

    def make_runner(self, tp: TensorParallel, dtype: torch.dtype, device: torch.device):
        module, _, name = self.spec.runner.partition(":")
        runner = getattr(importlib.import_module(module), name)
        return runner.load(
            resolve(self.spec.model, revision=self.spec.revision),
            resolve(self.spec.target, revision=self.spec.target_revision),
            self.spec.shapes,
            dtype=dtype,
            device=device,
            tp=tp,
        )

    def draft(self, plan: DraftPlan) -> DraftResult | None:
        """One step. Every rank takes part, rank 0 answers."""
        result = self.step(self.runner.draft, plan)
        return result if self.rank == 0 else None

    def attach(self, verifier: str) -> int | None:
        """First drafter slot of this Verifier's share; None when every share is taken.

        A sequence in the Verifier's slot i uses drafter slot `first + i`, so a lease on the
        Verifier is a lease on the Drafter too.
        """
        if verifier not in self.places:
            if not self.free_places:
                return None
            self.places[verifier] = self.free_places.pop()
        return self.places[verifier] * self.spec.slots_per_verifier

    def detach(self, verifier: str) -> None:
        """Give the Verifier's share of slots to the next one that asks."""
        place = self.places.pop(verifier, None)
        if place is not None:
            self.free_places.append(place)


VerifierWorker = ray.remote(concurrency_groups=CONCURRENCY)(VerifierRank)
DrafterWorker = ray.remote(concurrency_groups=CONCURRENCY)(DrafterRank)
