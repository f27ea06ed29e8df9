"""Everything that a Router measures, as one picklable snapshot, and how snapshots add up."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.metrics.request_record import RequestFigures
from deployments.metrics.stage import StageTimes
from dflash_core.statistics import AcceptanceStatistics


@dataclass
class Counters:
    """What only grows, also when replicas come and go.

    Attributes:
        acceptance: decode steps of all requests.
        verify, draft: steps of the two models, and the way to them and back.
        requests: as their clients experienced them.
    """

    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    verify: StageTimes = field(default_factory=StageTimes)
    draft: StageTimes = field(default_factory=StageTimes)
    requests: RequestFigures = field(default_factory=RequestFigures)

    def add(self, other: Counters) -> None:
        self.acceptance.add(other.acceptance)
        self.verify.add(other.verify)
        self.draft.add(other.draft)
        self.requests.add(other.requests)

    @property
    def stage_steps(self) -> dict[str, float]:
        """Steps of the two models; verifying includes the steps of prompts."""
        return {"verify": self.verify.steps, "draft": self.draft.steps}

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Time in the models, on the way to them and back, and of requests waiting for slots."""
        return {
            "verify": self.verify.model_seconds,
            "draft": self.draft.model_seconds,
            "transfer": self.verify.transfer_seconds + self.draft.transfer_seconds,
            "queue": self.requests.queue_seconds,
        }

    @property
    def feature_bytes(self) -> dict[str, float]:
        """Hidden states moved, by direction as the Router sees it."""
        return {
            "from_verifier": self.verify.feature_bytes,
            "to_drafter": self.draft.feature_bytes,
        }

    def accepted_per_position(self, num_drafts: int = 0) -> dict[str, float]:
        """Drafts accepted by place in the block, with zeros up to `num_drafts`."""
        accepted = enumerate(self.acceptance.accepted_per_position)
        return dict.fromkeys(map(str, range(num_drafts)), 0) | {
            str(position): count for position, count in accepted
        }


@dataclass(frozen=True)
class Gauges:
    """How things are now.

    Attributes:
        running, waiting: requests with and without a slot.
        slots: places in the KV caches of all Verifiers.
        verifiers, drafters, routers: replicas at work.
    """

    running: int = 0
    waiting: int = 0
    slots: int = 0
    verifiers: int = 0
    drafters: int = 0
    routers: int = 0

    def __add__(self, other: Gauges) -> Gauges:
        """Of several Routers: requests belong to one of them, model replicas are shared."""
        return Gauges(
            running=self.running + other.running,
            waiting=self.waiting + other.waiting,
            slots=max(self.slots, other.slots),
            verifiers=max(self.verifiers, other.verifiers),
            drafters=max(self.drafters, other.drafters),
            routers=self.routers + other.routers,
        )


@dataclass(frozen=True)
class Snapshot:
    """The figures of one Router, at a time of its own monotonic clock."""

    router: str
    taken: float
    counters: Counters
    gauges: Gauges


class RollCall:
    """The figures of all Routers of the application.

    A Router that is gone stays in the sums, because a counter that decreases looks like a restart
    to Prometheus. So each Router remembers what it has heard of the others, and tells it with its
    own figures: as long as one of those that have answered a scrape lives, nothing is forgotten.
    """

    def __init__(self) -> None:
        self._known: dict[str, Snapshot] = {}

    def report(self, own: Snapshot) -> list[Snapshot]:
        """What this Router knows, its own figures first."""
        others = [snapshot for name, snapshot in self._known.items() if name != own.router]
        return [own, *others]

    def total(self, reports: list[list[Snapshot]]) -> tuple[Counters, Gauges]:
        """The sums over all Routers, from the reports of those that answered."""
        for snapshot in (snapshot for report in reports for snapshot in report):
            known = self._known.get(snapshot.router)
            if known is None or known.taken < snapshot.taken:
                self._known[snapshot.router] = snapshot
        counters = Counters()
        for snapshot in self._known.values():
            counters.add(snapshot.counters)
        gauges = Gauges()
        for own, *_ in reports:
            gauges += own.gauges
        return counters, gauges
