"""`parallel: nxd` on a node or with packages that cannot serve is refused at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dflash_core.neuron.errors import NeuronError
from dflash_core.nxd import installation
from dflash_core.nxd.parallel import NxdParallel
from tests.neuron.fake_installation import FakeNode, trn2_devices

TORCH = ".".join(torch.__version__.split(".")[:2])
CORES = range(0, 8)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """A good one, but for the packages, for a process on the cores 0 to 7."""
    node = FakeNode(tmp_path, monkeypatch)
    node.devices(trn2_devices())
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-7")
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    monkeypatch.delenv("NEURON_RT_ROOT_COMM_ID", raising=False)
    return node


@pytest.fixture
def xla(node: FakeNode) -> FakeNode:
    node.install("torch-neuronx", f"{TORCH}.0.2.12.22436", f"torch=={TORCH}.*", "torch-xla")
    return node


@pytest.fixture
def installed(xla: FakeNode) -> FakeNode:
    xla.install("neuronx-distributed", "0.18.27753", "torch-neuronx")
    return xla


def refused(message: str) -> None:
    with pytest.raises(NeuronError, match=message):
        installation.open_cores(CORES, 2)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is imported again, and after the test it is what it was before."""
    monkeypatch.setitem(sys.modules, "neuronx_distributed", sys)
    del sys.modules["neuronx_distributed"]


def test_a_good_node_passes(installed: FakeNode, nxd: None) -> None:
    assert installation.open_cores(CORES, 2) == NxdParallel(size=8, logical_nc_config=2)


def test_no_torch_neuronx(node: FakeNode) -> None:
    refused("parallel is nxd, but torch-neuronx is not installed for .*python.*parallel: native")


def test_the_native_one(node: FakeNode) -> None:
    node.install("torch-neuronx", f"{TORCH}.3.0.1278", "torch")
    refused(rf"torch-neuronx {TORCH}\.3\.0\.1278 is the native one .*there is parallel: native")


def test_for_another_torch(node: FakeNode) -> None:
    node.install("torch-neuronx", "2.9.0.2.12.22436", "torch==2.9.*", "torch-xla==2.9.*")
    refused(rf"2\.9\.0\.2\.12\.22436 does not belong to torch {TORCH}.*torch 2\.9")


def test_no_neuronx_distributed(xla: FakeNode) -> None:
    refused("neuronx-distributed is not installed for .*Neuron SDK up to 2.33.*parallel: native")


def test_a_newer_neuronx_distributed(xla: FakeNode) -> None:
    xla.install("neuronx-distributed", "0.19.1")
    refused(r"neuronx-distributed 0\.19\.1 is newer than 0\.18.*SDK 2\.34 on AWS ends it")


def test_an_older_one(xla: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    xla.install("neuronx-distributed", "0.12.1")
    (xla.site / "neuronx_distributed.py").write_text("ModelBuilder = None\n")
    forget(monkeypatch)
    refused(r"0\.12\.1 has no NxDParallelState, shard_checkpoint: it is too old")


def test_installed_but_it_cannot_be_loaded(
    installed: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed.site / "neuronx_distributed.py").write_text("import no_torch_xla_here\n")
    forget(monkeypatch)
    refused("cannot be loaded .*no_torch_xla_here.*runtime-lib")


def test_the_cores_of_the_process_are_checked(
    installed: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    refused("NEURON_RT_VISIBLE_CORES is '0' in a worker that was given core 0-7")
    installed.devices(trn2_devices(chips=1))
    refused("NeuronCore 4 is not on this node, which has cores 0-3 on 1 chips")
