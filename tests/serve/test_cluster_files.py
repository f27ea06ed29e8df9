"""Files in cluster/ are what Ray and KubeRay take, and say the same as the configurations."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from deployments.app import CONTROL_CPUS, bundles
from deployments.app_args import AppArgs
from deployments.cluster_resources import missing

ROOT = Path(__file__).parents[2]
LOGICAL_CORES_PER_CHIP = 4


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.fixture
def trn2() -> dict[str, Any]:
    return load("configs/trn2-llama-3.1-8b.yaml")


def fits(args: AppArgs, node: dict[str, float]) -> None:
    models = [bundles(args, args.target), bundles(args, args.speculation)]
    assert missing([[{"CPU": CONTROL_CPUS}], *models], [node]) is None


def test_the_requirements_for_pytorch_xla_are_the_project_s_but_torch_and_numpy() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "cluster/nxd-requirements.txt").read_text(encoding="utf-8").splitlines()
    brought = [line for line in project["dependencies"] if line.startswith(("torch==", "numpy=="))]
    assert len(brought) == 2
    assert [line for line in lines if not line.startswith("#")] == [
        line for line in project["dependencies"] if line not in brought
    ]


def test_ray_up_accepts_the_cluster_of_one_node(trn2: dict[str, Any]) -> None:
    config = prepare_config(load("cluster/trn2-cluster.yaml"))
    validate_config(config)
    node = config["available_node_types"][config["head_node_type"]]
    assert node["node_config"]["InstanceType"] == "trn2.48xlarge"
    fits(AppArgs.model_validate(trn2["applications"][0]["args"]), node["resources"])


class TestRayService:
    @pytest.fixture
    def service(self) -> dict[str, Any]:
        return load("cluster/trn2-rayservice.yaml")

    @pytest.fixture
    def pod(self, service: dict[str, Any]) -> dict[str, Any]:
        return service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]

    def test_it_serves_the_configuration_for_one_node(
        self, service: dict[str, Any], trn2: dict[str, Any]
    ) -> None:
        deployed = yaml.safe_load(service["spec"]["serveConfigV2"])
        ServeDeploySchema.model_validate(deployed)
        [application], [expected] = deployed["applications"], trn2["applications"]
        assert application["args"].pop("cluster_wait_s") > 0
        assert application == expected
        assert deployed["http_options"]["port"] == trn2["http_options"]["port"]

    def test_its_fields_are_those_of_kuberay(self, service: dict[str, Any]) -> None:
        """RayServiceSpec, RayClusterSpec and HeadGroupSpec of KubeRay's `ray.io/v1`: an API server
        drops a field that it does not know, without a word."""
        spec = service["spec"]
        cluster = spec["rayClusterConfig"]
        head = cluster["headGroupSpec"]
        assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
        assert spec.keys() == {"serveConfigV2", "rayClusterConfig"}
        assert cluster.keys() == {"rayVersion", "headGroupSpec"}
        assert head.keys() == {"rayStartParams", "template"}
        assert all(isinstance(value, str) for value in head["rayStartParams"].values())

    def test_ray_has_as_many_cores_as_the_pod_has_chips(
        self, service: dict[str, Any], pod: dict[str, Any], trn2: dict[str, Any]
    ) -> None:
        cluster = service["spec"]["rayClusterConfig"]
        assert cluster["rayVersion"] == ray.__version__
        # KubeRay puts the value into a shell command, hence the quotes around it.
        started = yaml.safe_load(
            yaml.safe_load(cluster["headGroupSpec"]["rayStartParams"]["resources"])
        )
        [container] = pod["containers"]
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requests == limits
        chips = int(limits["aws.amazon.com/neuron"])
        assert started == {"neuron_cores": chips * LOGICAL_CORES_PER_CHIP}
        args = AppArgs.model_validate(trn2["applications"][0]["args"])
        fits(args, {"CPU": float(limits["cpu"]), **started})

    def test_the_pod_has_the_token_shared_memory_and_a_cache(self, pod: dict[str, Any]) -> None:
        [container] = pod["containers"]
        environment = {item["name"]: item for item in container["env"]}
        assert "secretKeyRef" in environment["HF_TOKEN"]["valueFrom"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert environment["DFLASH_CACHE"]["value"].startswith("/cache")
        assert "hostPath" in volumes[mounts["/cache"]]
        assert any(item["key"] == "aws.amazon.com/neuron" for item in pod["tolerations"])
        assert {port["containerPort"] for port in container["ports"]} >= {6379, 8265, 8000}
