"""Replicas that come and go on purpose: new versions, more of them, fewer of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from tests.serve.application import Application, idle
from tests.serve.load import Load
from tests.serve.tiny_pair import Tiny, prompt_of

NAME = "rollout"
MAX_TOKENS = 120
READY_S = 120


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> dict[int, list[int]]:
    return {n: tiny.continuation(prompt_of(n), MAX_TOKENS) for n in range(5, 11)}


def deploy(port: int, args: dict[str, Any], **replicas: int) -> None:
    """What `serve deploy` does with a file; the calls of a rollout go the same way."""
    application = {
        "name": NAME,
        "route_prefix": f"/{NAME}",
        "import_path": "deployments.app:build",
        "args": args,
        "deployments": [{"name": name, "num_replicas": n} for name, n in replicas.items()],
    }
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)


@contextmanager
def running(port: int) -> Iterator[Application]:
    app = Application(NAME, f"http://127.0.0.1:{port}/{NAME}")
    try:
        app.wait_until_ready()
        yield app
    finally:
        app.http.close()
        serve.delete(NAME)


def test_replicas_that_come_and_go_lose_nothing(
    http_port: int, tiny: Tiny, expected: dict[int, list[int]]
) -> None:
    args = tiny.args(verifiers_per_drafter=2)
    deploy(http_port, args, Verifier=1)
    with running(http_port) as app:
        with Load(app, expected) as load:
            deploy(http_port, args, Verifier=2)
            # Both work, and one Drafter serves them both.
            stats = app.wait_until(lambda stats: used(stats) == 2, READY_S)
            assert len(stats["drafters"]) == 1
            assert {part["drafter"] for part in stats["verifiers"].values()} == {*stats["drafters"]}
            deploy(http_port, args, Verifier=1)
            app.wait_until(lambda stats: len(stats["verifiers"]) == 1, READY_S)
        assert "\n".join(load.wrong) == ""
        assert load.finished >= len(expected)
        app.wait_until(idle, 30)


def test_a_new_version_takes_over_while_the_old_one_finishes(
    http_port: int, tiny: Tiny, expected: dict[int, list[int]]
) -> None:
    deploy(http_port, tiny.args())
    with running(http_port) as app:
        old = app.stats()
        with Load(app, expected) as load:
            deploy(http_port, tiny.args() | {"max_num_seqs": 3, "served_model_name": "newer"})
            deadline = time.monotonic() + READY_S
            while (new := app.stats())["router_pid"] == old["router_pid"]:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            app.wait_until(lambda stats: used(stats) == 1, READY_S)
        assert "\n".join(load.wrong) == ""
        assert load.finished >= len(expected)
        new = app.wait_until(idle, 30)
        assert new["verifiers"].keys().isdisjoint(old["verifiers"])
        [verifier] = new["verifiers"].values()
        assert verifier["replica"]["slots"] == 3
        assert app.http.get("/v1/models").json()["data"][0]["id"] == "newer"


def used(stats: dict[str, Any]) -> int:
    """Verifiers that have drafted and verified for somebody."""
    return sum(part["speculation"]["num_drafts"] > 0 for part in stats["verifiers"].values())
