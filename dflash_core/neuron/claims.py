"""Exclusive use of NeuronCores among the processes of one machine.

A claim is a bound socket in Linux's abstract namespace: the kernel lets one process have a name,
and takes it back the moment that process ends, however it ends. No file is left behind, and no
service has to be asked. Containers with a network of their own have claims of their own, as they
have devices of their own.
"""

from __future__ import annotations

import errno
import socket
import time

from dflash_core.neuron.cores import CoreMap
from dflash_core.neuron.errors import NeuronError

POLL_S = 0.2


class Claim:
    """Holds a name until `release` or the end of the process."""

    def __init__(self, name: str) -> None:
        """Raises OSError (EADDRINUSE) where a process already holds it."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(f"\0dflash/{name}")
        except OSError:
            self._socket.close()
            raise

    def release(self) -> None:
        self._socket.close()


def claim(name: str) -> Claim | None:
    """The claim, or None if another process has it."""
    try:
        return Claim(name)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise


def claim_group(cores: CoreMap, timeout: float) -> tuple[int, Claim]:
    """A group of cores that no other replica on this machine has.

    Args:
        timeout: seconds to wait for one; a replica that is just being replaced has its group still.

    Returns:
        The first core of the group, and the claim to keep.

    Raises:
        NeuronError: every group is taken.
    """
    end = time.monotonic() + timeout
    while True:
        for first in cores.firsts:
            held = claim(f"neuron-group-{first}")
            if held is not None:
                return first, held
        if time.monotonic() >= end:
            raise NeuronError(
                f"all {len(cores.firsts)} groups of {cores.size} cores in neuron_cores = "
                f"{cores.text!r} are in use by other replicas on this node; name more cores there, "
                "lower num_replicas, or stop the other application"
            )
        time.sleep(POLL_S)


def claim_core(core: int, timeout: float) -> Claim:
    """The core for this process alone, before the Neuron runtime asks for it.

    Args:
        timeout: seconds to wait: the process of a replaced replica may take a moment to end.

    Raises:
        NeuronError: another process of this application type holds it.
    """
    end = time.monotonic() + timeout
    while True:
        held = claim(f"neuron-core-{core}")
        if held is not None:
            return held
        if time.monotonic() >= end:
            raise NeuronError(
                f"NeuronCore {core} is in use by another worker on this node; the neuron_cores of "
                "two deployments overlap, or an earlier worker has not ended (see neuron-ls)"
            )
        time.sleep(POLL_S)
