"""Which NeuronCores the ranks of a model run on.

A trn2.48xlarge has 16 chips of four logical cores each (LNC 2), numbered 0 to 63 along the chips.
Ranks that exchange data should share chips, or sit on neighbours: so the cores are written down per
deployment, and every replica gets a group of as many adjacent cores as it has ranks, starting at a
multiple of that number. Ray counts cores (the resource `neuron_cores`) but gives out whatever
number is free, which would put a group across chips.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.core_list import core_list
from dflash_core.neuron.errors import NeuronError


@dataclass(frozen=True)
class CoreMap:
    """The cores of one deployment, `[first, first + size)` for each replica that may run on a node.

    Attributes:
        text: as the configuration has it, e.g. "0-7,16-63".
        size: cores per replica, one per rank.
        firsts: first core of each group, ascending.
    """

    text: str
    size: int
    firsts: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, size: int) -> CoreMap:
        """`text` holds comma-separated core numbers and ranges, ascending: "0-7,16-63".

        Raises:
            NeuronError: it is malformed, or cannot be cut into aligned groups of `size` cores.
        """
        if size < 1 or size & (size - 1):
            raise NeuronError(
                f"tensor_parallel_size = {size} is no power of two, as Trainium 2 needs it"
            )
        try:
            cores = core_list(text, "neuron_cores")
        except ValueError as error:
            raise NeuronError(str(error)) from error
        if len(cores) % size:
            raise NeuronError(
                f"neuron_cores = {text!r} are {len(cores)} cores; a replica of "
                f"tensor_parallel_size {size} needs {size}, so name a multiple of that"
            )
        firsts = cores[::size]
        for first, group in zip(firsts, _groups(cores, size), strict=True):
            if first % size or group != list(range(first, first + size)):
                raise NeuronError(
                    f"neuron_cores = {text!r}: the {size} ranks of a replica would run on cores "
                    f"{', '.join(map(str, group))}; they must be adjacent and start at a multiple "
                    f"of {size}, so that they share chips (four logical cores each) or neighbours"
                )
        return cls(text, size, tuple(firsts))

    @property
    def cores(self) -> frozenset[int]:
        return frozenset(core for first in self.firsts for core in self.group(first))

    def group(self, first: int) -> range:
        """The cores of the replica that starts at `first`, in rank order."""
        return range(first, first + self.size)


def check_disjoint(target: CoreMap, drafter: CoreMap) -> None:
    """A core belongs to one process. Raises NeuronError."""
    shared = sorted(target.cores & drafter.cores)
    if shared:
        raise NeuronError(
            f"neuron_cores of the target ({target.text}) and of the drafter ({drafter.text}) share "
            f"{', '.join(map(str, shared))}; a core belongs to one process, so give them others"
        )


def _groups(cores: list[int], size: int) -> list[list[int]]:
    return [cores[start : start + size] for start in range(0, len(cores), size)]
