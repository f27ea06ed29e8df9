"""The `serve run` YAML file: read and checked, application and all, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.app import build
from deployments.app_args import AppArgs
from dflash_core.errors import CheckpointError, PairingError

IMPORT_PATH = "deployments.app:build"


class ConfigFileError(Exception):
    """The file does not describe a server that can run; the message says what to change."""


def read_config(config: Path, port: int | None) -> dict[str, Any]:
    """The file as Ray Serve takes it, with the address filled in. Raises ConfigFileError."""
    try:
        description = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"is not YAML: {error}") from error
    if not isinstance(description, dict):
        raise ConfigFileError("is not a Ray Serve config: a mapping with `applications` is needed")
    try:
        schema = ServeDeploySchema.model_validate(description)
    except ValidationError as error:
        raise ConfigFileError(_explain(error)) from error
    if not schema.applications:
        raise ConfigFileError("has no applications")
    http = description.setdefault("http_options", {})
    if port is not None:
        http["port"] = port
    http.setdefault("host", "127.0.0.1")
    http.setdefault("port", 8000)
    return description


def check_applications(description: dict[str, Any]) -> None:
    """Build every application here, where a mistake is known in seconds and said once.

    Raises:
        ConfigFileError: a field of `args`, a checkpoint, or a pair that does not fit.
    """
    for application in description["applications"]:
        if application["import_path"] != IMPORT_PATH:
            continue
        try:
            build(AppArgs.model_validate(application.get("args") or {}))
        except ValidationError as error:
            raise ConfigFileError(_explain(error, "args.")) from error
        except (CheckpointError, PairingError, ValueError) as error:
            raise ConfigFileError(str(error)) from error


def _explain(error: ValidationError, prefix: str = "") -> str:
    problems = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        field = ".".join(map(str, problem["loc"]))
        if field:  # else it is about several fields, and names them
            message = f"{prefix}{field}: {message} (it is {_shortened(problem['input'])})"
        problems.append(message)
    return "\n  ".join(["does not describe a server:", *problems])


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
