"""A Neuron node that is not there: package metadata and a neuron-ls that prints what it is told.

What is faked is what `dflash_core.neuron.installation` asks the operating system for. The fields of
the JSON follow AWS's neuron-ls documentation; no real device was seen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_core.neuron import installation


def trn2_devices(*, chips: int = 16, logical_nc_config: int = 2) -> list[dict[str, Any]]:
    """neuron-ls of a trn2.48xlarge: eight physical cores a chip."""
    cores = 8 // logical_nc_config
    return [
        {
            "neuron_device": chip,
            "nc_count": cores,
            "logical_neuroncore_config": logical_nc_config,
            "neuroncore_ids": list(range(chip * cores, (chip + 1) * cores)),
            "neuron_processes": [],
        }
        for chip in range(chips)
    ]


class FakeNode:
    """Installs packages and tools by writing files where they are looked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site = folder / "site"
        self.site.mkdir()
        self.tool = folder / "neuron-ls"
        monkeypatch.syspath_prepend(str(self.site))
        monkeypatch.setattr(installation, "NEURON_LS", self.tool)

    def install(self, name: str, version: str, *requires: str) -> None:
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {item}" for item in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")

    def neuron_ls(self, output: str, *, status: int = 0) -> None:
        self.tool.write_text(
            f"#!{sys.executable}\nimport sys\nassert sys.argv[1:] == ['--json-output']\n"
            f"sys.stdout.write({output!r})\nsys.exit({status})\n"
        )
        self.tool.chmod(0o755)

    def devices(self, devices: list[dict[str, Any]]) -> None:
        self.neuron_ls(json.dumps(devices))
