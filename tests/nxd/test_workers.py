"""One process drives all cores of a model: what is reserved for it, and that it loads and steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from deployments import app, workers
from deployments.app_args import AppArgs
from deployments.specs import DrafterSpec, VerifierSpec
from deployments.worker_group import worker_environment
from dflash_core.neuron.claims import claim
from dflash_core.plans import scratch_draft_plan, scratch_verify_plan
from tests.neuron.fake_installation import FakeNode
from tests.nxd.test_installation import installed, node, xla  # noqa: F401
from tests.tiny import write_drafter, write_target


def args(target: str = "t", drafter: str = "d", **changes: Any) -> AppArgs:
    return AppArgs.model_validate(
        {
            "target": {"model": target, "tensor_parallel_size": 8, "neuron_cores": "0-7"},
            "speculation": {
                "drafter": drafter,
                "num_speculative_tokens": 3,
                "neuron_cores": "8",
            },
            "device": "neuron",
            "parallel": "nxd",
            "all_greedy": True,
            "dtype": "float32",
            "max_num_seqs": 1,
            "max_model_len": 64,
            "prefill_chunk_size": 32,
            "context_buckets": [64],
        }
        | changes
    )


class TestArgs:
    def test_native_is_the_default(self) -> None:
        assert AppArgs.model_validate({"target": {"model": "t"}}).parallel == "native"

    def test_another_device_is_refused(self) -> None:
        with pytest.raises(ValidationError, match="parallel is nxd, but device is cpu: .*native"):
            args(device="cpu")

    def test_another_class_that_drafts_is_refused(self) -> None:
        speculation = {"drafter": "d", "num_speculative_tokens": 3, "neuron_cores": "8"}
        with pytest.raises(ValidationError, match="speculation.runner is my:Drafter; with nxd"):
            args(speculation=speculation | {"runner": "my:Drafter"})

    def test_one_process_reserves_what_its_ranks_would(self) -> None:
        made = args()
        replica, process = app.bundles(made, made.target)
        assert process == {"CPU": 4.0, "neuron_cores": 8.0}
        assert len(app.bundles(made.model_copy(update={"parallel": "native"}), made.target)) == 9


def specs(made: AppArgs, taps: tuple[int, ...]) -> tuple[VerifierSpec, DrafterSpec]:
    common = {
        "revision": None,
        "dtype": made.dtype,
        "compile": "eager",
        "device": "neuron",
        "shapes": made.shapes(1),
        "channel_bytes": 1 << 20,
    }
    verifier = VerifierSpec(
        model=made.target.model,
        tapped_layers=taps,
        plan_bytes=1 << 20,
        **common,
        **app.rank_options(made, made.target),
    )
    drafter = DrafterSpec(
        model=made.speculation.drafter,
        target=made.target.model,
        target_revision=None,
        runner=app.NXD_RUNNER,
        slots_per_verifier=1,
        **common,
        **app.rank_options(made, made.speculation),
    )
    return verifier, drafter


def test_the_process_sees_all_its_cores_and_none_else() -> None:
    verifier, drafter = specs(args(), (0,))
    for spec, core, cores, number in ((verifier, 0, "0-7", "8"), (drafter, 8, "8", "1")):
        environment = worker_environment(spec, 0, core, 0)
        assert environment["NEURON_RT_VISIBLE_CORES"] == cores
        assert environment["NEURON_RT_NUM_CORES"] == number
        assert environment["NEURON_LOGICAL_NC_CONFIG"] == "2"
        assert "RANK" not in environment and "MASTER_PORT" not in environment


@pytest.mark.timeout(600)
def test_the_real_workers_load_and_step(
    installed: FakeNode,  # noqa: F811
    nxd: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The classes of the actors, in this process: claims, checks, compiling, a step each."""
    target = write_target(tmp_path / "target", num_hidden_layers=2)
    drafter = write_drafter(tmp_path / "drafter", target, layers=1, target_layer_ids=(0, 1))
    verifier_spec, drafter_spec = specs(args(str(target), str(drafter)), (0, 1))
    verifier = workers.VerifierRank(verifier_spec, 0, 0)
    verifier.load(store_port=0)
    assert claim("neuron-core-7") is None, "another process must not get it"
    prompt = scratch_verify_plan(verifier_spec.shapes, 1, 32, prefill=True, start=0)
    result = verifier.verify(prompt)
    assert [len(tokens) for tokens in result.tokens] == [1]
    assert (result.features.rows, result.features.width) == (32, 2 * 64)

    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "8")
    rank = workers.DrafterRank(drafter_spec, 0, 8)
    rank.load(store_port=0)
    drafts = rank.draft(scratch_draft_plan(drafter_spec.shapes, 1, None, start=5)).tokens
    assert np.shape(drafts) == (1, 3)
    assert all(0 <= token < 256 for token in drafts[0])
    for each in (*verifier.claims, *rank.claims):
        each.release()
