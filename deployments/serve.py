"""`serve run` of a config file, plus what it lacks: another port, and word of when it is ready.

`python -m deployments.serve CONFIG [--port N]` runs in the foreground. It says where the server
listens once it answers. It ends with status 1 if the file is wrong, which it says before it starts
anything, or if the application cannot be deployed.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
import yaml
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview
from ray.serve.scripts import run as serve_run

from deployments.config_file import ConfigFileError, check_applications, read_config
from deployments.priority import put_models_first

POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0


def main(
    config: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Ray Serve YAML")],
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Overrides its port")] = None,
) -> None:
    """Run CONFIG with Ray Serve and announce when it is ready."""
    # A shell that starts this in the background has it ignore Ctrl-C's signal; nothing else would
    # end it in order then.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        description = read_config(config, port)
        _require_free_port(description["http_options"])
        check_applications(description)
    except ConfigFileError as error:
        typer.echo(f"{config}: {error}", err=True)
        raise typer.Exit(1) from None
    failed = threading.Event()
    watcher = threading.Thread(target=_announce, args=(description, failed), daemon=True)
    with tempfile.NamedTemporaryFile("w", suffix=f"-{config.name}") as effective:
        yaml.safe_dump(description, effective)
        effective.flush()
        watcher.start()
        try:
            serve_run([effective.name], standalone_mode=False)
        finally:
            if failed.is_set():
                raise typer.Exit(1)


def _require_free_port(http: dict[str, Any]) -> None:
    host, port = http["host"], http["port"]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigFileError(
                f"{host}:{port} cannot be used ({error.strerror}); choose another PORT"
            ) from error


def _announce(description: dict[str, Any], failed: threading.Event) -> None:
    """Wait until the server answers and say so; if it cannot be deployed, interrupt the run."""
    http, application = description["http_options"], description["applications"][0]
    prefix = (application.get("route_prefix") or "/").rstrip("/")
    url = f"http://{http['host']}:{http['port']}{prefix}"
    while not (_is_running() and _answers(f"{url}/health")):
        reason = _failure()
        if reason:
            print(f"\nThe application cannot be deployed: {reason}", flush=True)
            failed.set()
            os.kill(os.getpid(), signal.SIGINT)
            return
        time.sleep(POLL_SECONDS)
    time.sleep(POLL_SECONDS)  # Ray is a moment late with what the replicas have logged
    arguments = application.get("args", {})
    if arguments.get("device", "cpu") == "cpu":
        put_models_first()
    model = arguments.get("served_model_name") or arguments.get("target", {}).get("model")
    print(
        f"\nListening on {url} (model {model}). Try:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}]}\'\n',
        flush=True,
    )


def _is_running() -> bool:
    """Whether all deployments have their replicas; before that, asking them is just noise."""
    statuses = [application.status for application in _applications().values()]
    return bool(statuses) and all(status == ApplicationStatus.RUNNING for status in statuses)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _applications() -> dict[str, ApplicationStatusOverview]:
    if not ray.is_initialized():  # asking Serve now would start a cluster
        return {}
    try:
        return serve.status().applications
    except Exception:  # Serve is not up yet; Ray has no narrower way to tell
        return {}


def _failure() -> str | None:
    """Why the deployment failed for good, if it did."""
    for application in _applications().values():
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            causes = [  # the last line of each traceback; Ray has logged the rest
                f"\n  {name}: {item.message.strip().splitlines()[-1]}"
                for name, item in application.deployments.items()
                if item.message.strip()
            ]
            return application.message + "".join(causes)
    return None


if __name__ == "__main__":
    typer.run(main)
