"""Cores are named per deployment, aligned to chips, and held by one process at a time."""

from __future__ import annotations

import subprocess
import sys
import uuid

import pytest

from dflash_core.neuron.claims import claim, claim_core, claim_group
from dflash_core.neuron.cores import CoreMap, check_disjoint
from dflash_core.neuron.errors import NeuronError

HOLD = """
import sys
from dflash_core.neuron.claims import Claim
held = Claim(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


class TestMap:
    def test_seven_pairs_fit_a_trn2_48xlarge(self) -> None:
        """64 logical cores: TP8 targets around the two chips whose cores the drafters have."""
        targets, drafters = CoreMap.parse("0-7,16-63", 8), CoreMap.parse("8-14", 1)
        assert targets.firsts == (0, 16, 24, 32, 40, 48, 56)
        assert drafters.firsts == tuple(range(8, 15))
        check_disjoint(targets, drafters)
        assert len(targets.cores) + len(drafters.cores) == 63
        assert max(targets.cores) == 63

    def test_ranks_get_the_cores_of_their_group_in_order(self) -> None:
        assert list(CoreMap.parse("0-7,16-23", 8).group(16)) == list(range(16, 24))

    @pytest.mark.parametrize(
        ("text", "size", "message"),
        [
            ("", 1, "neither a core number nor a range"),
            ("0-", 1, "neither a core number nor a range"),
            ("0..7", 8, "neither a core number nor a range"),
            ("7-0", 8, "must ascend"),
            ("0-7,4-11", 8, "must ascend"),
            ("0-6", 8, "are 7 cores; a replica of tensor_parallel_size 8 needs 8"),
            ("4-11", 8, "would run on cores 4, 5, .* start at a multiple of 8"),
            ("0-3,5-8", 8, "would run on cores 0, 1, 2, 3, 5, .* adjacent"),
            ("3-4", 2, "multiple of 2"),
            ("0-5", 6, "tensor_parallel_size = 6 is no power of two"),
        ],
    )
    def test_what_is_not_a_chip_aligned_map_says_why(
        self, text: str, size: int, message: str
    ) -> None:
        with pytest.raises(NeuronError, match=message):
            CoreMap.parse(text, size)

    def test_a_core_belongs_to_one_deployment(self) -> None:
        with pytest.raises(NeuronError, match=r"target \(0-7\) .* drafter \(7\) share 7;"):
            check_disjoint(CoreMap.parse("0-7", 8), CoreMap.parse("7", 1))


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4()}"


@pytest.mark.skipif(sys.platform != "linux", reason="Neuron devices are Linux devices")
class TestClaims:
    def test_a_name_has_one_holder_until_it_is_released(self, name: str) -> None:
        first = claim(name)
        assert first is not None
        assert claim(name) is None
        first.release()
        again = claim(name)
        assert again is not None
        again.release()

    def test_the_kernel_frees_what_a_killed_process_held(self, name: str) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert claim(name) is None
        process.kill()
        process.wait()
        freed = claim(name)
        assert freed is not None
        freed.release()

    def test_replicas_of_a_deployment_get_different_groups(self) -> None:
        cores = CoreMap.parse("1000-1007,1016-1031", 8)
        held = [claim_group(cores, timeout=0) for _ in range(3)]
        assert [first for first, _ in held] == [1000, 1016, 1024]
        with pytest.raises(NeuronError, match="all 3 groups of 8 cores .* in use.*num_replicas"):
            claim_group(cores, timeout=0)
        held[1][1].release()
        first, again = claim_group(cores, timeout=0)
        assert first == 1016
        for _, claimed in [held[0], (first, again), held[2]]:
            claimed.release()

    def test_a_core_in_use_is_an_error_that_names_it(self) -> None:
        held = claim_core(2000, timeout=0)
        with pytest.raises(NeuronError, match="NeuronCore 2000 is in use .* neuron_cores of"):
            claim_core(2000, timeout=0)
        held.release()
