"""Every file in configs/ but the trainer's is one that `serve run` takes, with args for `build`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.app_args import AppArgs

ROOT = Path(__file__).parents[2]
NAMES = sorted(
    file.name for file in (ROOT / "configs").glob("*.yaml") if not file.name.startswith("train-")
)


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "configs" / name).read_text(encoding="utf-8"))


def test_the_files_that_the_makefile_and_the_readme_name_are_there() -> None:
    assert {"local.yaml", "local-baseline.yaml"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_a_serve_config_of_this_application(name: str) -> None:
    deploy = ServeDeploySchema.model_validate(load(name))
    assert deploy.applications
    for application in deploy.applications:
        module, _, builder = application.import_path.partition(":")
        assert callable(getattr(importlib.import_module(module), builder))
        AppArgs.model_validate(application.args)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("local")])
def test_a_local_file_listens_on_loopback_only(name: str) -> None:
    """Who opens the port to a network should have decided to."""
    assert ServeDeploySchema.model_validate(load(name)).http_options.host == "127.0.0.1"


def test_the_baseline_is_the_local_application_without_speculation() -> None:
    [local], [baseline] = (
        load(name)["applications"] for name in ("local.yaml", "local-baseline.yaml")
    )
    assert local["args"]["speculation"] is not None
    assert baseline["args"] == local["args"] | {"speculation": None}
    assert {key: value for key, value in local.items() if key != "args"} == {
        key: value for key, value in baseline.items() if key != "args"
    }
