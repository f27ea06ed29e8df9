"""A node or a package that cannot serve is refused at once: what was found, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core import runtime
from dflash_core.neuron import installation
from dflash_core.neuron.errors import NeuronError
from tests.neuron.fake_installation import FakeNode, trn2_devices

TORCH = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """A good one, for a worker on core 5, of which tests break a part."""
    node = FakeNode(tmp_path, monkeypatch)
    node.devices(trn2_devices())
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "5")
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    monkeypatch.delenv("NEURON_RT_ROOT_COMM_ID", raising=False)
    return node


def refused(message: str, *, core: int = 5, logical_nc_config: int = 2) -> None:
    with pytest.raises(NeuronError, match=message):
        installation.check(core, logical_nc_config)


def test_a_good_node_passes(node: FakeNode) -> None:
    node.install("torch-neuronx", f"{TORCH}.3.0.1278+abc", "torch")
    installation.check(5, 2)


class TestPackage:
    def test_missing(self, node: FakeNode) -> None:
        refused("torch-neuronx is not installed for .*python.*device: cpu")

    def test_opening_the_device_says_so_too(self, node: FakeNode) -> None:
        """This machine has none: nothing here is faked but the node's tools."""
        with pytest.raises(NeuronError, match="is not installed"):
            runtime.open_device("neuron", core=5)

    def test_the_xla_one(self, node: FakeNode) -> None:
        node.install("torch-neuronx", "2.9.0.2.12.22436", "torch==2.9.*", "torch-xla==2.9.*")
        refused(r"2\.9\.0\.2\.12\.22436 is the PyTorch/XLA one .*torch device is 'neuron'")

    def test_a_beta(self, node: FakeNode) -> None:
        node.install("torch-neuronx", "2.11.3.0", "torch")
        refused(r"2\.11\.3\.0 is older than 2\.13\.3")

    def test_for_another_torch(self, node: FakeNode) -> None:
        node.install("torch-neuronx", "2.99.3.0", "torch")
        refused(r"2\.99\.3\.0 does not belong to torch 2\.")

    def test_installed_but_it_cannot_be_loaded(
        self, node: FakeNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node.install("torch-neuronx", f"{TORCH}.3.0", "torch")
        (node.site / "torch_neuronx.py").write_text("raise OSError('libnrt.so.1: no such file')\n")
        with pytest.raises(NeuronError, match=r"cannot be loaded \(libnrt.so.1.*runtime-lib"):
            runtime.open_device("neuron", core=5)


@pytest.fixture
def installed(node: FakeNode) -> FakeNode:
    node.install("torch-neuronx", f"{TORCH}.3.0", "torch")
    return node


class TestNode:
    def test_no_neuron_instance(self, installed: FakeNode) -> None:
        installed.tool.unlink()
        refused("neuron-ls is not on this node: it is no Neuron instance, or .*aws-neuronx-tools")

    def test_the_driver_is_not_loaded(self, installed: FakeNode) -> None:
        installed.neuron_ls("no driver", status=1)
        refused("failed with status 1: no driver; is the Neuron driver loaded")

    def test_it_does_not_answer(self, installed: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
        installed.tool.write_text("#!/bin/sh\nsleep 60\n")
        monkeypatch.setattr(installation, "ANSWER_SECONDS", 0.2)
        refused("gave no answer within 0 s; the Neuron driver hangs")

    @pytest.mark.parametrize("output", ["", "neuron-ls: error", "{}"])
    def test_an_answer_that_is_none(self, installed: FakeNode, output: str) -> None:
        installed.neuron_ls(output)
        refused("neuron-ls.*(did not answer in JSON|finds no Neuron device)")

    def test_a_core_that_the_node_lacks(
        self, installed: FakeNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        installed.devices(trn2_devices(chips=1))  # a trn2.3xlarge
        refused("NeuronCore 5 is not on this node, which has cores 0-3 on 1 chips; change")

    def test_another_lnc_than_the_configuration_says(self, installed: FakeNode) -> None:
        installed.devices(trn2_devices(logical_nc_config=1))
        refused(
            r"Neuron device 0 runs with .*configuration 1 \(LNC\), but logical_nc_config is 2; .*"
            "echo 2 > /opt/aws/neuron/logical_nc_config"
        )

    def test_the_other_way_round(self, installed: FakeNode) -> None:
        refused(r"configuration 2 \(LNC\), but logical_nc_config is 1", logical_nc_config=1)


class TestEnvironment:
    def test_another_core_than_was_meant(
        self, installed: FakeNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0,1,2")
        refused("NEURON_RT_VISIBLE_CORES is '0,1,2' in a worker that was given core 5")

    @pytest.mark.parametrize("flags", ["--lnc 1", "-O1 --lnc=1", "--logical-nc-config 1"])
    def test_compiler_flags_for_another_lnc(
        self, installed: FakeNode, monkeypatch: pytest.MonkeyPatch, flags: str
    ) -> None:
        monkeypatch.setenv("NEURON_CC_FLAGS", flags)
        refused("NEURON_CC_FLAGS asks the compiler for LNC 1, but logical_nc_config is 2")
        monkeypatch.setenv("NEURON_CC_FLAGS", flags.replace("1", "2"))
        installation.check(5, 2)

    def test_a_leaked_root_of_the_collectives(
        self, installed: FakeNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "10.0.0.1:44444")
        refused("NEURON_RT_ROOT_COMM_ID is set for all processes .*10.0.0.1:44444.*unset it")


def test_an_unknown_device_and_a_neuron_device_without_a_core_are_refused() -> None:
    with pytest.raises(ValueError, match=r"device = 'tpu' is not one of \['cpu', 'cuda', 'neuron'"):
        runtime.open_device("tpu")
    with pytest.raises(ValueError, match="needs the number of this rank's core"):
        runtime.open_device("neuron")


def test_on_a_cpu_a_step_runs_as_it_is() -> None:
    device = runtime.open_device("cpu")

    def step(x: Any) -> Any:
        return x

    assert runtime.compile_step(step, device) is step
    runtime.seal(device)


def test_on_neuron_a_step_is_compiled_whole_and_static(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the call is seen: there is no such backend here. `torch.device` has no name neuron."""

    class Neuron:
        type = "neuron"

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda step, **how: asked.append(how) or step)
    runtime.compile_step(lambda: None, Neuron())
    assert asked == [{"backend": "neuron", "fullgraph": True, "dynamic": False}]
