"""All graphs of a model: traced, compiled and loaded by NxD's ModelBuilder.

A program is a module whose `forward` is one of the model's steps at one static shape, as `shape`
says while it is traced. NxD wants one module for all graphs of a model, which share weights and
key/value cache; parameters without a name of their own (`*args`) or with a default other than None
are not allowed, nor are arguments that are no tensors. So steps are not registered in it, only what
they are made of, and what is static about a step is an attribute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dflash_core.gguf import cache_root
from dflash_core.nxd.parallel import NxdParallel
from dflash_core.step_shapes import DraftShape, InjectShape, TargetShape

Shape = TargetShape | InjectShape | DraftShape
# neuronx-cc's options as NxD sets them by default, and the LNC, which has to be the runtime's.
COMPILER_ARGS = "--enable-saturate-infinity --auto-cast=none --model-type=transformer -O1"

logger = logging.getLogger(__name__)


class Graph(NamedTuple):
    """A shape and tensors of that shape."""

    shape: Shape
    args: tuple[Tensor, ...]


class Program(Protocol):
    """What `compile_program` makes graphs of, besides being an nn.Module."""

    shape: Shape

    def graphs(self) -> Sequence[Graph]: ...


class CompiledProgram:
    """The graphs on the cores: `program(shape, *args)` runs one. Results are CPU tensors."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, shape: Shape, *args: Tensor) -> Any:
        return self._model(*args, model_name=tag(shape))


def tag(shape: Shape) -> str:
    """A graph's name, also that of a folder: "TargetShape-0-1-10-512"."""
    return "-".join((type(shape).__name__, *(str(int(size)) for size in shape)))


def compile_program(
    make: Callable[[], nn.Module],
    whole: dict[str, Tensor],
    *,
    dtype: torch.dtype,
    tp: NxdParallel,
    name: str,
) -> CompiledProgram:
    """Trace every graph, compile it, shard and set the weights, and load all of it.

    Args:
        make: the program (a `Program`), called where NxD's layers can be made.
        whole: the weights of a single rank that holds everything, by the program's names.
        dtype: of weights and cache.
        name: of the folder for the compiler's files; nothing in it is used again.
    """
    from neuronx_distributed import ModelBuilder, NxDParallelState

    from dflash_core.nxd.weights import sharded_weights

    state = NxDParallelState(
        world_size=tp.size,
        tensor_model_parallel_size=tp.size,
        lnc_size=tp.logical_nc_config,
    )
    with torch.no_grad(), state:
        with _default_dtype(dtype):
            program = make().eval().requires_grad_(False)
        shards = sharded_weights(program, whole, tp.size)
        builder = ModelBuilder(program)
        graphs = program.graphs()
        for number, graph in enumerate(graphs, 1):
            logger.info("graph %d of %d: %s", number, len(graphs), graph.shape)
            program.shape = graph.shape
            builder.trace(args=graph.args, tag=tag(graph.shape))
        compiled = builder.compile(
            compiler_workdir=cache_root() / "nxd" / name,
            compiler_args=f"{COMPILER_ARGS} --lnc={tp.logical_nc_config}",
        )
    compiled.set_weights(shards)
    compiled.to_neuron()
    return CompiledProgram(compiled)


def named(**parts: nn.Module) -> dict[str, Tensor]:
    """The weights of the parts of a program, by the names that they have in it."""
    return {
        f"{part}.{name}": weight
        for part, module in parts.items()
        for name, weight in module.state_dict().items()
    }


def example(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """An input to trace with: a valid token, slot, position and length. Only its shape and type
    go into the graph."""
    return torch.ones(shape, dtype=dtype)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
