"""A config file with a mistake is refused in seconds, with a message that says what to change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deployments.config_file import ConfigFileError, check_applications, read_config
from tests.conftest import PACKAGED_TARGET

DRAFTER = "package://dflash_core/drafters/smollm2-135m-dflash"


def config(args: str) -> str:
    return f"""
applications:
  - name: dflash
    import_path: deployments.app:build
    args: {args}
"""


def pair(**options: object) -> str:
    speculation = {"drafter": DRAFTER, "num_speculative_tokens": 7} | options
    return config(f"{{target: {{model: '{PACKAGED_TARGET}'}}, speculation: {speculation}}}")


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigFileError) as refusal:
        check_applications(read_config(path, None))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a mapping with `applications` is needed"),
        ("- a\n- b", "a mapping with `applications` is needed"),
        ("a: [b", "is not YAML"),
        ("applications: []", "has no applications"),
        ("applications: 7", "applications: "),
        ("http_options: {port: many}\napplications: []", "http_options.port: "),
        (config("{}"), "args.target: Field required"),
        (config("{target: {modl: a}}"), "args.target.modl: Extra inputs are not permitted"),
        (config("{target: {model: a}, max_num_seqs: 0}"), "args.max_num_seqs: "),
        (config("{target: {model: a}, context_buckets: [3]}"), "  context_buckets = (3,) ends"),
        (config("{target: {model: /nowhere}}"), "/nowhere: no such folder"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_a_pair_that_does_not_fit_is_named(tmp_path: Path, packaged_target: Path) -> None:
    assert "num_speculative_tokens is 8" in refused(tmp_path, pair(num_speculative_tokens=8))


def test_address_and_port_are_filled_in(tmp_path: Path, packaged_target: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(pair())
    description = read_config(path, 8123)
    assert description["http_options"] == {"host": "127.0.0.1", "port": 8123}
    assert read_config(path, None)["http_options"]["port"] == 8000
    check_applications(description)


def test_the_command_ends_with_the_message_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config("{target: {model: /nowhere}}"))
    command = [sys.executable, "-m", "deployments.serve", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"{path}: /nowhere: no such folder")
