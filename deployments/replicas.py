"""How replicas of the model deployments present themselves to a Router."""

from __future__ import annotations

from dataclasses import dataclass

# Routers ask every replica for its description once a second: not worth a line in the log each.
QUIET = {"enable_access_log": False}
SERVE_NAMESPACE = "serve"  # where Ray Serve names its replicas' actors by their full ids


class ReplicaLost(Exception):
    """The replica, or its connection, is gone; what ran on it can go on elsewhere."""


@dataclass(frozen=True)
class Lease:
    """A slot of one Verifier replica, held as long as the stream that brought it is open."""

    replica_id: str
    slot: int


@dataclass(frozen=True)
class ReplicaDescription:
    """How a Router finds the workers of a replica.

    Attributes:
        replica_id: Ray Serve's id of the replica.
        pid: process of the replica itself.
        workers, worker_pids: actor names and processes in rank order.
        slots, free_slots: places in the KV cache (a Drafter's are given out with the Verifier's,
            so it has no count of free ones).
    """

    replica_id: str
    pid: int
    workers: tuple[str, ...]
    worker_pids: tuple[int, ...]
    slots: int
    free_slots: int | None = None
