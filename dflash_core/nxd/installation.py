"""Is this a Trainium node with AWS's PyTorch/XLA stack? The twin of `neuron.installation`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from importlib import metadata

from dflash_core.neuron.environment import visible_cores
from dflash_core.neuron.errors import NeuronError
from dflash_core.neuron.installation import (
    PACKAGE,
    check_cores,
    check_environment,
    needs_xla,
    numbers,
    read_devices,
)
from dflash_core.nxd.parallel import NxdParallel

NXD = "neuronx-distributed"
NEWEST = (0, 18)  # whose source `dflash_core.nxd` was written from
USED = ("ModelBuilder", "NxDParallelState", "shard_checkpoint")
REMEDY = (
    "install torch 2.9 with the torch-neuronx and neuronx-distributed of one Neuron SDK up to 2.33 "
    "(README, On the PyTorch/XLA stack), or set parallel: native"
)


def open_cores(cores: range, logical_nc_config: int) -> NxdParallel:
    """The tensor-parallel group of all these cores, once it is certain that this process can use
    them.

    Raises:
        NeuronError: what this node lacks, and what to do.
    """
    check_node(cores, logical_nc_config)
    check_environment(os.environ, visible_cores(cores), logical_nc_config)
    try:
        package = importlib.import_module("neuronx_distributed")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise NeuronError(
            f"{NXD} is installed but cannot be loaded ({error}); {REMEDY}, and "
            "aws-neuronx-runtime-lib and aws-neuronx-collectives"
        ) from error
    missing = [name for name in USED if not hasattr(package, name)]
    if missing:
        raise NeuronError(
            f"{NXD} {metadata.version(NXD)} has no {', '.join(missing)}: it is too old; {REMEDY}"
        )
    return NxdParallel(size=len(cores), logical_nc_config=logical_nc_config)


def check_node(cores: Iterable[int], logical_nc_config: int) -> None:
    """Refuse a node that lacks the software or these cores. Raises NeuronError."""
    check_packages()
    check_cores(read_devices(), cores, logical_nc_config)


def check_packages() -> None:
    """torch-neuronx is the PyTorch/XLA one and of this torch, neuronx-distributed is there.

    Raises NeuronError.
    """
    torch_neuronx = _distribution(PACKAGE)
    version, torch_version = torch_neuronx.version, metadata.version("torch")
    if not needs_xla(torch_neuronx):
        raise NeuronError(
            f"parallel is nxd, but {PACKAGE} {version} is the native one (it does not require "
            f"torch-xla), for which there is parallel: native; {REMEDY}"
        )
    if numbers(torch_version)[:2] != numbers(version)[:2]:
        raise NeuronError(
            f"{PACKAGE} {version} does not belong to torch {torch_version}: the first two numbers "
            f"must agree; {REMEDY}"
        )
    found = _distribution(NXD).version
    if numbers(found)[:2] > NEWEST:
        raise NeuronError(
            f"{NXD} {found} is newer than {'.'.join(map(str, NEWEST))}, the release that this "
            f"server was written for (from Neuron SDK 2.34 on AWS ends it on Trainium 2); {REMEDY}"
        )


def _distribution(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise NeuronError(
            f"parallel is nxd, but {name} is not installed for {sys.executable}; {REMEDY}"
        ) from None
