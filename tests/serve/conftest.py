"""One Ray cluster for all tests of the served application."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 makes timings a lottery

import ray
from ray import serve

from tests.serve.tiny_pair import Tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def http_port() -> Iterator[int]:
    """The port of Ray Serve's HTTP proxy on a cluster of this test session's own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    env = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    if "DFLASH_CACHE" in os.environ:
        env["DFLASH_CACHE"] = os.environ["DFLASH_CACHE"]
    ray.init(
        num_cpus=32,  # logical: many small applications share the machine's cores
        resources={"neuron_cores": 64},  # as many as a trn2.48xlarge; nothing is behind them
        include_dashboard=False,
        object_store_memory=1 << 30,
        runtime_env={"env_vars": env},
        log_to_driver=False,
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, packaged_target: Path, tokenizer: Any) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"), packaged_target, tokenizer)
