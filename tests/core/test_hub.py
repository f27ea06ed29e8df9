"""Models come from the hub as data only, and each refusal of it becomes advice.

The hub is a local server that speaks as much of its HTTP interface as a download needs; the client
under test runs as the command `python -m dflash_core.checkpoint` in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.tiny import write_target

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a snapshot needs; the owner's name decides."""

    folder: Path
    requested: list[str]

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        path = self.path.split("?")[0].removeprefix("/api/models/").lstrip("/")
        owner = path.split("/")[0]
        self.requested.append(path)
        if self.path.startswith("/api/") and not self.path.startswith("/api/models/"):
            self.reply(404, b"{}", {}, body)
        elif owner != "open":
            status, code = {
                "private": (401, None),
                "unknown": (404, "RepoNotFound"),
                "forbidden": (403, None),
                "licensed": (403, "GatedRepo"),
                "revisionless": (404, "RevisionNotFound"),
                "broken": (418, None),
            }[owner]
            self.reply(status, b"{}", {"X-Error-Code": code} if code else {}, body)
        elif "/tree/" in path:
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}
                for file in self.folder.iterdir()
            ]
            self.reply(200, json.dumps(files).encode(), {"Content-Type": "application/json"}, body)
        elif "/resolve/" in path:
            data = (self.folder / path.split("/")[-1]).read_bytes()
            headers = {"ETag": f'"{path.split("/")[-1]}"', "X-Repo-Commit": COMMIT}
            self.reply(200, data, headers, body)
        else:
            info = {"id": "open/model", "sha": COMMIT, "siblings": []}
            self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body)

    def reply(self, status, data, headers, body):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_args):
        pass


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


@pytest.fixture
def hub(target):
    (target / "pytorch_model.bin").write_bytes(b"pickle")
    (target / "modeling.py").write_text("raise SystemExit")
    handler = type("LocalHub", (Hub,), {"folder": target, "requested": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def hub_environment(home: Path, port: int, *, offline: bool = False) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return environment | {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def check(home: Path, port: int, *models: str, offline: bool = False) -> tuple[int, list[str]]:
    """`python -m dflash_core.checkpoint MODEL...`, its exit status and its lines."""
    done = subprocess.run(
        [sys.executable, "-m", "dflash_core.checkpoint", *models],
        cwd=ROOT,
        env=hub_environment(home, port, offline=offline),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout.splitlines()


def start(home: Path, port: int, config: Path) -> tuple[int, str]:
    """`python -m deployments.serve CONFIG` with this hub: its exit status and its errors."""
    done = subprocess.run(
        [sys.executable, "-m", "deployments.serve", str(config)],
        cwd=ROOT,
        env=hub_environment(home, port),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


def baseline_or_pair(folder: Path, target: str, drafter: str | None) -> Path:
    args: dict[str, object] = {"target": {"model": target}}
    if drafter is not None:
        args["speculation"] = {"drafter": drafter, "num_speculative_tokens": 3}
    application = {"name": "dflash", "route_prefix": "/"}
    application |= {"import_path": "deployments.app:build", "args": args}
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [application], "http_options": {"port": 0}}))
    return config


def test_a_reachable_model_is_fetched_without_code_and_pickles(hub, target, tmp_path):
    status, (line,) = check(tmp_path / "hf", hub.server_port, "open/model")
    assert status == 0
    assert line.startswith("OK  open/model -> ")
    assert line.endswith("(target, 0.2 M parameters, float32)")
    folder = Path(line.split(" -> ")[1].split(" (")[0])
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == (
        target / "model.safetensors"
    ).read_bytes()
    fetched = {path.split("/")[-1] for path in hub.RequestHandlerClass.requested}
    assert not fetched & {"modeling.py", "pytorch_model.bin"}

    hub.shutdown()
    hub.server_close()
    for offline in (False, True):
        status, lines = check(
            tmp_path / "hf", hub.server_port, "open/model", "open/other", offline=offline
        )
        assert status == 1
        assert lines[0] == line, "what is in the cache stays usable"
        reason = "HF_HUB_OFFLINE forbids downloads" if offline else "hub cannot be reached"
        assert lines[1].startswith("FAIL  open/other: not in the local cache")
        assert reason in lines[1]


def test_each_refusal_says_what_to_do(hub, target, tmp_path):
    expected = {
        "private/model": "answered 401: no such model, or it is private or gated.*HF_TOKEN",
        "unknown/model": "answered 404: there is no such model; check the spelling",
        "forbidden/model": "access refused.*accept its licence.*HF_TOKEN",
        "licensed/model": "access refused.*accept its licence.*HF_TOKEN",
        "revisionless/model": "no revision",
        "broken/model": "answered 418; try again later",
    }
    status, lines = check(tmp_path / "hf", hub.server_port, str(target), *expected)
    assert status == 1
    assert lines[0].startswith(f"OK  {target} -> ")
    for line, (model, message) in zip(lines[1:], expected.items(), strict=True):
        assert line.startswith(f"FAIL  {model}: ")
        assert re.search(message, line), line


GATED = r"licensed/model: access refused.*accept its licence.*HF_TOKEN"
UNKNOWN = r"unknown/model: the hub answered 404: there is no such model; check the spelling"


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (
            ("open/model", "licensed/model"),
            rf"1 of 2 models cannot be used:\n  open/model: accessible\n  {GATED}",
        ),
        (
            ("licensed/model", "open/model"),
            rf"1 of 2 models cannot be used:\n  {GATED}.*\n  open/model: accessible",
        ),
        (
            ("licensed/model", "unknown/model"),
            rf"2 of 2 models cannot be used:\n  {GATED}.*\n  {UNKNOWN}",
        ),
        (("licensed/model", None), rf"config.yaml: {GATED}"),
    ],
    ids=["drafter", "target", "both", "baseline"],
)
def test_a_start_names_every_model_that_cannot_be_had_before_it_fetches_weights(
    hub, tmp_path, models, message
):
    status, errors = start(tmp_path / "hf", hub.server_port, baseline_or_pair(tmp_path, *models))
    assert status == 1
    assert re.search(message, errors), errors
    asked = {path for path in hub.RequestHandlerClass.requested if "/resolve/" in path}
    assert all(path.endswith("/config.json") for path in asked), asked
