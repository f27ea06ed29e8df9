"""The device that a rank runs on: the one place that knows cpu, cuda and neuron apart.

neuron is native torch-neuronx (AWS Trainium 2 and later): a torch device, a process group and a
compiler backend of that name. What is particular about its nodes is in `dflash_core.neuron`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from dflash_core.neuron import installation
from dflash_core.neuron.errors import NeuronError
from dflash_core.parallel import SINGLE, TensorParallel
from dflash_core.step_shapes import DraftShape, TargetShape

PROCESS_GROUP_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "neuron": "neuron"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# One compiled step serves every bucket; torch's limit of 8 graphs per function would end that.
MAX_GRAPHS = 1024
COMPILERS = ("eager", "inductor")
_compiler = "eager"

Step = TypeVar("Step", bound=Callable)
Shape = TypeVar("Shape", TargetShape, DraftShape)
logger = logging.getLogger(__name__)


def open_device(name: str, *, core: int | None = None, logical_nc_config: int = 2) -> torch.device:
    """The device, once it is certain that this process can use it.

    Args:
        core: neuron only: the logical NeuronCore that this process was started for.
        logical_nc_config: neuron only: physical cores per logical one.

    Raises:
        ValueError: an unknown device, or a neuron device without its core.
        NeuronError: what this node lacks, and what to do.
    """
    process_group_backend(name)
    if name == "neuron":
        if core is None:
            raise ValueError("device neuron needs the number of this rank's core")
        installation.check(core, logical_nc_config)
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        torch._dynamo.config.accumulated_recompile_limit = MAX_GRAPHS
        try:
            importlib.import_module("torch_neuronx")
            return torch.device("neuron")
        except (ImportError, OSError, RuntimeError) as error:
            raise NeuronError(
                f"torch-neuronx is installed but cannot be loaded ({error}); install it together "
                "with its torch, and aws-neuronx-runtime-lib and aws-neuronx-collectives"
            ) from error
    return torch.device(name)


def open_store() -> dist.TCPStore:
    """A rendezvous store on a free loopback port (`.port`); keep it alive as long as the group."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join_group(device: str, rank: int, size: int, store_port: int) -> TensorParallel:
    """Join the tensor-parallel group of one model; every rank calls this once.

    On neuron this starts the Neuron runtime, so nothing may have used the device before.

    Raises:
        ValueError: an unknown device.
    """
    backend = process_group_backend(device)
    if size == 1:
        return SINGLE
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return TensorParallel(rank, size, dist.group.WORLD)


def process_group_backend(device: str) -> str:
    """gloo, nccl or neuron. Raises ValueError on an unknown device."""
    if device not in PROCESS_GROUP_BACKENDS:
        raise ValueError(f"device = {device!r} is not one of {sorted(PROCESS_GROUP_BACKENDS)}")
    return PROCESS_GROUP_BACKENDS[device]


def set_compiler(compiler: str) -> None:
    """What `compile_step` does on the CPU and on cuda from now on: "eager" (nothing) or "inductor".

    Raises:
        ValueError: another compiler.
    """
    global _compiler
    if compiler not in COMPILERS:
        raise ValueError(f"compile = {compiler!r} is not one of {list(COMPILERS)}")
    if compiler == "inductor":
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        torch._dynamo.config.accumulated_recompile_limit = MAX_GRAPHS
    _compiler = compiler


def compiled(device: torch.device) -> bool:
    """Whether steps are graphs, one for each shape."""
    return device.type == "neuron" or _compiler != "eager"


def compile_step(step: Step, device: torch.device) -> Step:
    """The step as the device runs it: compiled whole on neuron; elsewhere as `set_compiler` says.

    Every new combination of input shapes is one graph, compiled at its first call (minutes, then
    from the cache). `python -m dflash_core.graphs` lists and checks them without a device.
    """
    if not compiled(device):
        return step
    backend = "neuron" if device.type == "neuron" else _compiler
    return torch.compile(step, backend=backend, fullgraph=True, dynamic=False)


def warm_shapes(shapes: list[Shape], device: torch.device) -> list[Shape]:
    """Those of a step's shapes that have to run before a request does.

    Where steps are compiled all of them: each is a graph. Elsewhere the context length is only how
    far attention looks, so one of each of the others is enough.

    Args:
        shapes: named tuples of `dflash_core.step_shapes`, with a field `context`.
    """
    if compiled(device):
        return shapes
    return list({shape._replace(context=0): shape for shape in reversed(shapes)}.values())[::-1]


def seal(device: torch.device) -> None:
    """Call after warm-up: where steps are compiled, a shape that was not warmed up is from now on
    an error rather than minutes of compilation in the middle of a request. On neuron, operators
    that ran on the host because the device has none are named in the log.
    """
    if compiled(device):
        torch.compiler.set_stance("fail_on_recompile")
    if device.type != "neuron":
        return
    fallbacks = importlib.import_module("torch_neuronx").get_fallback_ops()
    if fallbacks:
        logger.warning("operators that run on the host, not on the NeuronCore: %s", fallbacks)
