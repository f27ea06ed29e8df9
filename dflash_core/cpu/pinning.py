"""Which of the machine's cores the compute threads of a rank run on."""

from __future__ import annotations

import os

from dflash_core.core_list import core_list


def rank_cores(text: str, ranks: int) -> tuple[frozenset[int], ...]:
    """The cores of every rank: "0-7,16-23" for one rank, "0-7|8-15" for two.

    Raises:
        ValueError: it is malformed, or names cores for another number of ranks.
    """
    parts = text.split("|")
    if len(parts) != ranks:
        raise ValueError(
            f"cpu_cores = {text!r} has cores for {len(parts)} ranks, but tensor_parallel_size is "
            f'{ranks}; separate the ranks by "|", e.g. "0-7|8-15"'
        )
    return tuple(frozenset(core_list(part, "cpu_cores")) for part in parts)


def pin(cores: frozenset[int]) -> None:
    """Keep the calling thread on these cores, and every thread that it starts from now on.

    Raises:
        ValueError: this process may not use one of them, or the system cannot pin threads.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("cpu_cores is set, but this system cannot pin threads; remove it")
    allowed = os.sched_getaffinity(0)
    if not cores <= allowed:
        raise ValueError(
            f"cpu_cores names {_numbers(cores - allowed)}, but this process may use "
            f"{_numbers(allowed)}; name some of those"
        )
    os.sched_setaffinity(0, cores)


def _numbers(cores: set[int] | frozenset[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
