"""Waiting for a compiled graph's message without burning a core, and waking up at once.

Ray 2.60 waits for a shared-memory channel by trying its semaphore in a loop, with or without a
timeout: an idle worker keeps one core busy for good, and the Router one more per step under way.
Where cores are few that slows down the very model that is being waited for; and a sleep between two
tries, however it is chosen, is either short, which costs cores too, or late. So whoever writes to
a channel rings a bell, a datagram to a socket of the reader's, who sleeps until then. A channel
that is closed does not ring, so the reader looks by itself now and then; and more often where no
bell is heard, from another node.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from typing import Any

import ray
from ray.exceptions import RayChannelTimeoutError
from ray.experimental.channel.shared_memory_channel import Channel

LOOK_S = 50e-3  # until a reader with a bell looks by itself
SHARE = 1 / 50  # of the time that has been waited: until one without a bell does
SHORTEST_S, LONGEST_S = 1e-3, 5e-3
FOREVER = (None, -1)  # Ray's words for "no timeout"


class Bell:
    """Rings when something has been written to a channel that this process reads."""

    def __init__(self, channel: Channel) -> None:
        actor = ray.get_runtime_context().get_actor_id()
        readers = [handle._actor_id.hex() for handle, _ in channel._reader_and_node_list]
        # Ray lists a proxy in the place of the process that drives a graph: the only reader there.
        reader = readers.index(actor) if actor in readers else 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self.heard = channel.is_local_node(channel._writer_node_id)
        try:
            self._socket.bind(_address(channel, reader))
        except OSError:
            self.heard = False
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Until it rings, but not longer."""
        if self._poll.poll(math.ceil(seconds * 1e3)):
            with contextlib.suppress(BlockingIOError):
                self._socket.recv(1)


def install() -> None:
    """Make every channel of this process wait and ring that way; calling it again does nothing."""
    if Channel.read is not read_patiently:
        Channel.read, Channel.write = read_patiently, write_and_ring


def read_patiently(channel: Channel, timeout: float | None = None) -> Any:
    """Stands in for `Channel.read(timeout)`, seconds. Raises RayChannelTimeoutError."""
    began = time.monotonic()
    end = math.inf if timeout in FOREVER else began + timeout
    if not hasattr(channel, "bell"):
        channel.bell = Bell(channel)
    while True:
        try:
            return ray_read(channel, 0)
        except RayChannelTimeoutError:
            now = time.monotonic()
            if now >= end:
                raise
            pause = LOOK_S
            if not channel.bell.heard:
                pause = min(max((now - began) * SHARE, SHORTEST_S), LONGEST_S)
            channel.bell.wait(min(pause, end - now))


def write_and_ring(channel: Channel, value: Any, timeout: float | None = None) -> None:
    """Stands in for `Channel.write(value, timeout)`. Raises RayChannelTimeoutError."""
    ray_write(channel, value, timeout)
    for reader in range(len(channel._reader_and_node_list)):
        with contextlib.suppress(OSError):  # nobody listens there, or not yet
            ringer.sendto(b"!", _address(channel, reader))


def _address(channel: Channel, reader: int) -> bytes:
    """In Linux's abstract namespace: nothing in the file system, gone with the socket."""
    return f"\0dflash-{channel._writer_ref.hex()}-{reader}".encode()


ray_read, ray_write = Channel.read, Channel.write
ringer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
ringer.setblocking(False)
