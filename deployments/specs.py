"""What a worker needs to know to load and serve its model: fully resolved, typed, picklable."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.neuron.cores import CoreMap
from dflash_core.shapes import StaticShapes


@dataclass(frozen=True)
class NeuronSpec:
    """Where a model runs on a Trainium node.

    Attributes:
        cores: the logical NeuronCores that its replicas may use.
        logical_nc_config: physical cores per logical one (LNC).
        parallel: "native", one process per rank, or "nxd", one process for all ranks of a replica.
    """

    cores: CoreMap
    logical_nc_config: int
    parallel: str = "native"


@dataclass(frozen=True)
class ModelSpec:
    """One model of the application.

    Attributes:
        model: checkpoint name (hub id, folder or package://).
        revision: hub revision, or None.
        dtype, device: names, e.g. "bfloat16", "cpu".
        compile: "eager" or "inductor", see `dflash_core.runtime.set_compiler`.
        shapes: static shapes of this model.
        tensor_parallel_size: ranks, one process each but with `parallel: nxd`.
        num_threads: compute threads per rank.
        rank_cores: for every rank the CPU cores that these are kept on; None = any.
        cpus_per_rank: Ray CPUs that a rank reserves.
        resources_per_rank: further Ray resources per rank, e.g. {"neuron_cores": 1}.
        neuron: None on other devices.
        channel_bytes: size of a compiled graph's buffer; must hold the largest message.
    """

    model: str
    revision: str | None
    dtype: str
    compile: str
    device: str
    shapes: StaticShapes
    tensor_parallel_size: int
    num_threads: int
    rank_cores: tuple[frozenset[int] | None, ...]
    cpus_per_rank: float
    resources_per_rank: dict[str, float]
    neuron: NeuronSpec | None
    channel_bytes: int

    @property
    def nxd(self) -> bool:
        """Whether one process drives all ranks."""
        return self.neuron is not None and self.neuron.parallel == "nxd"

    @property
    def ranks_per_process(self) -> int:
        return self.tensor_parallel_size if self.nxd else 1

    @property
    def num_processes(self) -> int:
        return self.tensor_parallel_size // self.ranks_per_process


@dataclass(frozen=True)
class VerifierSpec(ModelSpec):
    """The target.

    Attributes:
        tapped_layers: decoder layers whose output is a feature (none: baseline).
        plan_bytes: size of the buffer for plans.
    """

    tapped_layers: tuple[int, ...]
    plan_bytes: int


@dataclass(frozen=True)
class DrafterSpec(ModelSpec):
    """The drafter.

    Attributes:
        target, target_revision: checkpoint whose embedding and head it borrows.
        runner: import path of the class that drafts, "module:Class".
        slots_per_verifier: slots reserved for each attached Verifier.
    """

    target: str
    target_revision: str | None
    runner: str
    slots_per_verifier: int
