"""Capture a step as one graph, the way `torch.compile(backend="neuron")` would, but on no device.

Parameters, caches and inputs are meta tensors, so an 8B model costs no memory; ranks of a
tensor-parallel group are simulated by torch's fake process group. The front half of the compiler
is torch's own and is what runs on Trainium, too: Dynamo with `fullgraph=True, dynamic=False`, then
AOTAutograd with `keep_inference_input_mutations=True`, which is how torch-neuronx calls it
(`neuron_dynamo_backend/backend.py`). What follows there, lowering and neuronx-cc, is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

from dflash_core.parallel import SINGLE, TensorParallel


class CaptureError(Exception):
    """The step is not one static graph: it branches on values, or has a shape that depends on them.

    The message is the compiler's.
    """


class _Captured(Exception):
    """Ends the call that led to the capture: the graph itself is not to run."""


@dataclass(frozen=True)
class CapturedGraph:
    """One step at one set of shapes.

    Attributes:
        name: e.g. "target decode L=10 C=512".
        module: ATen operators; placeholders are the step's inputs, caches and parameters; writes
            to caches are `copy_` nodes at the end.
    """

    name: str
    module: fx.GraphModule

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def calls(self) -> list[fx.Node]:
        """The nodes that call an operator."""
        return [
            node
            for node in self.module.graph.nodes
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
        ]


def capture(name: str, step: Callable[..., Any], *args: Any) -> CapturedGraph:
    """Run the compiler's front half over `step(*args)`; tensors among `args` are meta tensors.

    Raises:
        CaptureError: it is not one static graph.
    """
    captured: list[CapturedGraph] = []

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def compiler(lowered: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
            captured.append(CapturedGraph(name, lowered))
            return make_boxed_func(_stop)

        return aot_module_simplified(
            module,
            inputs,
            fw_compiler=compiler,
            inference_compiler=compiler,
            keep_inference_input_mutations=True,
        )

    torch._dynamo.reset()
    try:
        with torch.inference_mode():
            torch.compile(step, backend=backend, fullgraph=True, dynamic=False)(*args)
    except _Captured:
        pass
    except torch._dynamo.exc.TorchDynamoException as error:
        raise CaptureError(f"{name}: {str(error).strip()}") from error
    finally:
        torch._dynamo.reset()
    if len(captured) != 1:
        raise CaptureError(f"{name}: {len(captured)} graphs instead of one")
    return captured[0]


def _stop(*_: Any) -> None:
    raise _Captured


@contextmanager
def simulated_group(rank: int, size: int) -> Iterator[TensorParallel]:
    """This process as one rank of a group whose other ranks do not exist.

    Collectives have the right shapes and meaningless values. Raises RuntimeError inside a real
    process group.
    """
    if size == 1:
        yield SINGLE
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield TensorParallel(rank, size, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
