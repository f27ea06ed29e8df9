"""The `args` of an application in a `serve run` YAML file."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.api.body_limit import MAX_BODY_BYTES
from dflash_core.cpu.pinning import rank_cores
from dflash_core.neuron.cores import CoreMap, check_disjoint
from dflash_core.neuron.errors import NeuronError
from dflash_core.shapes import StaticShapes, doublings

Device = Literal["cpu", "cuda", "neuron"]
Compiler = Literal["eager", "inductor"]
Parallel = Literal["native", "nxd"]
RUNNER = "dflash_core.drafter_runner:DrafterRunner"
Dtype = Literal["bfloat16", "float16", "float32"]


class Strict(BaseModel):
    """A misspelt or unknown field is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkerArgs(Strict):
    """Where and how the ranks of one model run."""

    tensor_parallel_size: int = Field(1, ge=1, description="ranks, one process and device each")
    num_threads: int = Field(1, ge=1, description="compute threads per rank")
    cpu_cores: str | None = Field(
        None,
        description="cores that the compute threads are kept on, ranks separated by |, e.g. "
        '"0-7|8-15"; default: any',
    )
    cpus_per_rank: float = Field(0.5, gt=0, description="Ray CPUs that each rank reserves")
    resources_per_rank: dict[str, float] = Field(
        default_factory=dict, description="other Ray resources per rank"
    )
    neuron_cores: str | None = Field(
        None, description='device neuron: logical NeuronCores, ranks times replicas, e.g. "0-7"'
    )

    @model_validator(mode="after")
    def _check_cores(self) -> WorkerArgs:
        self.core_map()
        for cores in self.rank_cores():
            if cores is not None and self.num_threads > len(cores):
                raise ValueError(
                    f"num_threads is {self.num_threads}, but cpu_cores = {self.cpu_cores!r} has "
                    f"{len(cores)} for a rank; threads that share a core wait for each other"
                )
        return self

    def rank_cores(self) -> tuple[frozenset[int] | None, ...]:
        """The CPU cores of every rank; None = any. Raises ValueError."""
        if self.cpu_cores is None:
            return (None,) * self.tensor_parallel_size
        return rank_cores(self.cpu_cores, self.tensor_parallel_size)

    def core_map(self) -> CoreMap | None:
        """The cores of every replica that a node may hold. Raises ValueError."""
        if self.neuron_cores is None:
            return None
        try:
            return CoreMap.parse(self.neuron_cores, self.tensor_parallel_size)
        except NeuronError as error:
            raise ValueError(str(error)) from error


class TargetArgs(WorkerArgs):
    """The target: a hub id, a folder or package://module/file.gguf."""

    model: str
    revision: str | None = None


class SpeculationArgs(WorkerArgs):
    """The drafter and how it is used."""

    drafter: str
    revision: str | None = None
    num_speculative_tokens: int = Field(..., ge=1, description="drafts per step (K)")
    adaptive: bool = Field(
        False,
        description="verify fewer drafts, or none, where that is faster",
    )
    verifiers_per_drafter: int = Field(1, ge=1, description="Verifier replicas that share one")
    draft_timeout_s: float = Field(
        0.5, gt=0, description="a request waits that long for drafts, then goes on without"
    )
    pipeline_groups: int = Field(
        2, ge=1, le=2, description="2: verify one half of the requests while drafting the other"
    )
    runner: str = Field(RUNNER, description="class that drafts, module:Class")


class AppArgs(Strict):
    """Everything that `deployments.app:build` takes."""

    target: TargetArgs
    speculation: SpeculationArgs | None = Field(None, description="null: the plain baseline")
    served_model_name: str | None = Field(None, description="default: the target's name")
    device: Device = "cpu"
    parallel: Parallel = Field(
        "native",
        description="device neuron: native torch-neuronx, or neuronx-distributed on PyTorch/XLA",
    )
    logical_nc_config: Literal[1, 2] = Field(
        2, description="device neuron: physical NeuronCores per logical one, as on the node (LNC)"
    )
    dtype: Dtype = "bfloat16"
    compile: Compiler = Field(
        "eager",
        description="how steps run on the CPU and on cuda: eager, or compiled at the start, one "
        "graph per bucket (inductor; needs a C++ compiler); device neuron always compiles",
    )
    max_num_seqs: int = Field(8, ge=1, description="requests that decode at once per Verifier")
    max_model_len: int = Field(2048, ge=2, description="longest prompt + output, in tokens")
    prefill_chunk_size: int = Field(256, ge=1, description="prompt tokens per step")
    max_queued_requests: int = Field(256, ge=0, description="waiting requests; more answer 429")
    request_timeout_s: float | None = Field(
        None, gt=0, description="a request that is not done by then ends with an error (408)"
    )
    stream_batching_interval_ms: float = Field(
        50.0, ge=0, description="tokens of a request that come faster are sent together"
    )
    drain_timeout_s: float = Field(
        120.0, ge=0, description="a replica that is to go may finish its requests for that long"
    )
    all_greedy: bool = Field(
        False, description="refuse requests that need more than the argmax of the logits"
    )
    num_seqs_buckets: list[int] | None = Field(None, description="batch sizes of decode steps")
    context_buckets: list[int] | None = Field(None, description="attention lengths")
    cluster_wait_s: float = Field(
        10, ge=0, description="the start waits that long for nodes with the resources it reserves"
    )
    api_key_env: str | None = Field(
        None, description="environment variable of the Router's process that holds the API key"
    )
    api_key_file: str | None = Field(
        None, description="file on the Router's node with API keys, one a line"
    )
    max_body_bytes: int = Field(
        MAX_BODY_BYTES, ge=1, description="larger request bodies answer 413"
    )
    cors_allow_origins: list[str] = Field(
        default_factory=list, description='origins whose web pages may use the API; "*" = all'
    )

    @model_validator(mode="after")
    def _check_shapes(self) -> AppArgs:
        self.shapes(self.max_num_seqs)
        return self

    @model_validator(mode="after")
    def _check_neuron(self) -> AppArgs:
        parts: dict[str, WorkerArgs] = {"target": self.target}
        if self.speculation is not None:
            parts["speculation"] = self.speculation
        maps = {name: part.core_map() for name, part in parts.items()}
        missing = [name for name, cores in maps.items() if cores is None]
        if self.device == "neuron" and missing:
            raise ValueError(
                f"device is neuron, but {missing[0]}.neuron_cores is missing; name the logical "
                'cores of its ranks, e.g. "0-7" (trn2.48xlarge has 0-63)'
            )
        if self.device == "neuron" and not self.all_greedy:
            raise ValueError(
                "device is neuron, but all_greedy is false: sampling is not among the graphs that "
                "are compiled for Trainium; set all_greedy: true"
            )
        if self.parallel == "nxd":
            self._check_nxd()
        target, drafter = maps["target"], maps.get("speculation")
        if target is not None and drafter is not None:
            try:
                check_disjoint(target, drafter)
            except NeuronError as error:
                raise ValueError(str(error)) from error
        return self

    def _check_nxd(self) -> None:
        if self.device != "neuron":
            raise ValueError(
                f"parallel is nxd, but device is {self.device}: neuronx-distributed runs on "
                "Trainium alone; set device: neuron, or parallel: native"
            )
        if self.speculation is not None and self.speculation.runner != RUNNER:
            raise ValueError(
                f"parallel is nxd, but speculation.runner is {self.speculation.runner}; with nxd "
                "there is one class that drafts, so leave runner out, or set parallel: native"
            )

    @property
    def num_drafts(self) -> int:
        return self.speculation.num_speculative_tokens if self.speculation else 0

    def shapes(self, num_slots: int) -> StaticShapes:
        """The static shapes of a model with that many slots. Raises ValueError."""
        shapes = StaticShapes.create(
            num_slots=num_slots,
            max_model_len=self.max_model_len,
            num_drafts=self.num_drafts,
            prefill_chunk=self.prefill_chunk_size,
        )
        adaptive = self.speculation is not None and self.speculation.adaptive
        half = (self.num_drafts + 1) // 2 - 1
        batch, context = shapes.num_seqs_buckets, shapes.context_buckets
        if self.num_seqs_buckets is not None:
            batch = tuple(self.num_seqs_buckets)
            batch += doublings(batch[-1], num_slots)[1:] if batch else ()
        if self.context_buckets is not None:
            context = tuple(self.context_buckets)
        return StaticShapes(
            num_slots=num_slots,
            max_model_len=shapes.max_model_len,
            num_drafts=shapes.num_drafts,
            prefill_chunk=shapes.prefill_chunk,
            num_seqs_buckets=batch,
            context_buckets=context,
            partial_drafts=(half,) if adaptive and half > 0 else (),
        )
