"""Is this a Trainium node on which this process can run? Answered before anything is loaded.

Only package metadata, the environment and `neuron-ls` are looked at: nothing here starts the Neuron
runtime, which may not run before the process group is made.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from dflash_core.neuron.environment import ROOT_COMM_ID
from dflash_core.neuron.errors import NeuronError

PACKAGE = "torch-neuronx"
OLDEST = (2, 13, 3)
NEURON_LS = Path("/opt/aws/neuron/bin/neuron-ls")
ANSWER_SECONDS = 20.0
LNC_FLAG = re.compile(r"(?:--lnc|-lnc|--logical-nc-config)[ =](\d+)")
REMEDY = (
    "install torch-neuronx >= 2.13.3 from AWS's Neuron package index (README, Trainium), or set "
    "device: cpu"
)


def check(core: int, logical_nc_config: int) -> None:
    """Refuse a process that could only fail later, or hang.

    Args:
        core: the logical NeuronCore of this process.
        logical_nc_config: what the configuration says about the node.

    Raises:
        NeuronError: what was found and what to do.
    """
    check_node([core], logical_nc_config)
    check_environment(os.environ, str(core), logical_nc_config)


def check_node(cores: Iterable[int], logical_nc_config: int) -> None:
    """Refuse a node that lacks the software or these cores. Raises NeuronError."""
    check_package()
    check_cores(read_devices(), cores, logical_nc_config)


def check_package() -> None:
    """torch-neuronx is there, is the native one, and belongs to this torch. Raises NeuronError."""
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise NeuronError(
            f"device is neuron, but {PACKAGE} is not installed for {sys.executable}; {REMEDY}"
        ) from None
    version = distribution.version
    if needs_xla(distribution):
        raise NeuronError(
            f"{PACKAGE} {version} is the PyTorch/XLA one (it requires torch-xla); this server runs "
            f"on the native one, whose torch device is 'neuron'; {REMEDY}, or parallel: nxd"
        )
    if numbers(version)[:3] < OLDEST:
        raise NeuronError(
            f"{PACKAGE} {version} is older than {'.'.join(map(str, OLDEST))}, the first release "
            f"with the native backend that this server was written for; {REMEDY}"
        )
    torch_version = metadata.version("torch")
    if numbers(torch_version)[:2] != numbers(version)[:2]:
        raise NeuronError(
            f"{PACKAGE} {version} does not belong to torch {torch_version}: the first two numbers "
            "must agree; install both for the same release, in one pip command"
        )


def needs_xla(distribution: metadata.Distribution) -> bool:
    """Whether a torch-neuronx is the PyTorch/XLA one."""
    return any(re.match(r"torch[-_]xla\b", item) for item in distribution.requires or [])


def check_environment(environment: Mapping[str, str], given: str, logical_nc_config: int) -> None:
    """The variables that the runtime will read say what was meant. Raises NeuronError.

    Args:
        given: the logical NeuronCore of this process, or the range of them.
    """
    visible = environment.get("NEURON_RT_VISIBLE_CORES")
    if visible != given:
        raise NeuronError(
            f"NEURON_RT_VISIBLE_CORES is {visible!r} in a worker that was given core {given}; "
            "something on this node overwrites it (Ray does where "
            "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES is not 1)"
        )
    flag = LNC_FLAG.search(environment.get("NEURON_CC_FLAGS", ""))
    if flag and int(flag[1]) != logical_nc_config:
        raise NeuronError(
            f"NEURON_CC_FLAGS asks the compiler for LNC {flag[1]}, but logical_nc_config is "
            f"{logical_nc_config}; the two must agree, so drop the flag or change the option"
        )
    if ROOT_COMM_ID in environment:
        raise NeuronError(
            f"{ROOT_COMM_ID} is set for all processes of this node ({environment[ROOT_COMM_ID]}): "
            "target and drafter would join one another's runtime; unset it where Ray is started"
        )


def read_devices() -> list[dict[str, Any]]:
    """The chips of this node, as neuron-ls describes them. Raises NeuronError."""
    try:
        answer = subprocess.run(
            [str(NEURON_LS), "--json-output"], capture_output=True, timeout=ANSWER_SECONDS
        )
    except FileNotFoundError:
        raise NeuronError(
            f"device is neuron, but {NEURON_LS} is not on this node: it is no Neuron instance, or "
            "its image lacks the driver and tools (aws-neuronx-dkms, aws-neuronx-tools)"
        ) from None
    except subprocess.TimeoutExpired:
        raise NeuronError(
            f"{NEURON_LS} gave no answer within {ANSWER_SECONDS:.0f} s; the Neuron driver hangs, "
            "restart the instance"
        ) from None
    if answer.returncode:
        reason = (answer.stderr or answer.stdout).decode(errors="replace").strip()
        raise NeuronError(
            f"{NEURON_LS} failed with status {answer.returncode}: {reason or 'no message'}; is the "
            "Neuron driver loaded (lsmod | grep neuron), are the devices given to this container?"
        )
    try:
        devices = json.loads(answer.stdout)
    except json.JSONDecodeError as error:
        raise NeuronError(f"{NEURON_LS} --json-output did not answer in JSON: {error}") from error
    if not isinstance(devices, list) or not devices:
        raise NeuronError(f"{NEURON_LS} finds no Neuron device on this node")
    return devices


def check_cores(
    devices: list[dict[str, Any]], wanted: Iterable[int], logical_nc_config: int
) -> None:
    """The cores exist, and are grouped as the configuration says. Raises NeuronError."""
    for device in devices:
        found = device.get("logical_neuroncore_config")
        if found != logical_nc_config:
            raise NeuronError(
                f"Neuron device {device.get('neuron_device')} runs with logical NeuronCore "
                f"configuration {found!r} (LNC), but logical_nc_config is {logical_nc_config}; set "
                f"the option to that and neuron_cores accordingly, or configure the node (echo "
                f"{logical_nc_config} > /opt/aws/neuron/logical_nc_config)"
            )
    cores = sorted(number for device in devices for number in device.get("neuroncore_ids", ()))
    for core in wanted:
        if core not in cores:
            raise NeuronError(
                f"NeuronCore {core} is not on this node, which has {_brief(cores)} on "
                f"{len(devices)} chips; change neuron_cores, or use a larger instance "
                "(trn2.48xlarge: 0-63)"
            )


def _brief(cores: list[int]) -> str:
    if not cores:
        return "none"
    if cores == list(range(cores[0], cores[-1] + 1)):
        return f"cores {cores[0]}-{cores[-1]}"
    return f"cores {', '.join(map(str, cores))}"


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.3.0.1278+abc" -> (2, 13, 3, 0, 1278)."""
    numbers: list[int] = []
    for part in re.split(r"[.+]", version):
        found = re.match(r"\d+", part)
        if not found:
            break
        numbers.append(int(found[0]))
    return tuple(numbers)
