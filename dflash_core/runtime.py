"""The device that a rank runs on: the one place that knows cpu, cuda and neuron apart."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dflash_core.parallel import SINGLE, TensorParallel

PROCESS_GROUP_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "neuron": "neuron"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_store() -> dist.TCPStore:
    """A rendezvous store on a free loopback port (`.port`); keep it alive as long as the group."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join_group(device: str, rank: int, size: int, store_port: int) -> TensorParallel:
    """Join the tensor-parallel group of one model; every rank calls this once.

    Raises:
        ValueError: an unknown device.
    """
    if size == 1:
        return SINGLE
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
    dist.init_process_group(process_group_backend(device), store=store, rank=rank, world_size=size)
    return TensorParallel(rank, size, dist.group.WORLD)


def process_group_backend(device: str) -> str:
    """gloo, nccl or neuron. Raises ValueError on an unknown device."""
    if device not in PROCESS_GROUP_BACKENDS:
        raise ValueError(f"device = {device!r} is not one of {sorted(PROCESS_GROUP_BACKENDS)}")
    return PROCESS_GROUP_BACKENDS[device]
