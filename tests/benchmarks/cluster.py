"""A Ray cluster of a benchmark's own, with its HTTP proxy on a free port of loopback."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ray
import yaml
from ray import serve

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "configs/local.yaml"


@contextmanager
def cluster(num_cpus: int = 32) -> Iterator[int]:
    """Run a cluster; yields the port of its proxy.

    Args:
        num_cpus: logical ones: applications share what the machine has.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}},
    )
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()


def application_args(config: Path) -> dict[str, Any]:
    """The `args` of the one application in a `serve run` file."""
    [application] = yaml.safe_load(config.read_text())["applications"]
    return application["args"]
