"""The `args` of an application: what is left out, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deployments.app_args import AppArgs

MINIMAL: dict[str, Any] = {"target": {"model": "some/target"}}
SPECULATION: dict[str, Any] = {"drafter": "some/drafter", "num_speculative_tokens": 7}


def parse(**changes: Any) -> AppArgs:
    return AppArgs.model_validate(MINIMAL | changes)


def test_a_target_is_all_that_must_be_named() -> None:
    args = parse()
    assert args.speculation is None and args.num_drafts == 0
    assert (args.device, args.dtype) == ("cpu", "bfloat16")
    assert args.target.tensor_parallel_size == 1


def test_null_means_no_speculation() -> None:
    assert parse(speculation=None) == parse()


def test_args_survive_a_yaml_file() -> None:
    """Serve keeps them as plain data between the file and the replicas."""
    args = parse(
        speculation=SPECULATION | {"resources_per_rank": {"neuron_cores": 1}},
        num_seqs_buckets=[1, 8],
    )
    assert AppArgs.model_validate(args.model_dump(mode="json")) == args


class TestRefused:
    @pytest.mark.parametrize(
        ("field", "changes"),
        [
            ("max_seqs", {"max_seqs": 8}),
            ("target.modle", {"target": {"model": "m", "modle": "n"}}),
            ("speculation.k", {"speculation": SPECULATION | {"k": 5}}),
        ],
    )
    def test_an_unknown_field_at_any_level(self, field: str, changes: dict[str, Any]) -> None:
        self.check(field, changes, "Extra inputs are not permitted")

    @pytest.mark.parametrize(
        ("field", "changes"),
        [
            ("target", {"target": None}),
            ("target.model", {"target": {}}),
            ("speculation.drafter", {"speculation": {"num_speculative_tokens": 3}}),
            ("speculation.num_speculative_tokens", {"speculation": {"drafter": "d"}}),
        ],
    )
    def test_a_missing_field(self, field: str, changes: dict[str, Any]) -> None:
        self.check(field, changes)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("device", "tpu"),
            ("dtype", "int8"),
            ("max_num_seqs", 0),
            ("max_model_len", 1),
            ("max_model_len", "long"),
            ("prefill_chunk_size", 0),
            ("max_queued_requests", -1),
        ],
    )
    def test_a_value_out_of_range(self, field: str, value: Any) -> None:
        self.check(field, {field: value})

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("num_speculative_tokens", 0),
            ("tensor_parallel_size", 0),
            ("num_threads", 0),
            ("cpus_per_rank", 0),
            ("verifiers_per_drafter", 0),
            ("draft_timeout_s", 0),
            ("pipeline_groups", 3),
        ],
    )
    def test_a_value_out_of_range_of_speculation(self, field: str, value: Any) -> None:
        self.check(f"speculation.{field}", {"speculation": SPECULATION | {field: value}})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"cpu_cores": "0-x"}, "cpu_cores = '0-x': '0-x' is neither"),
            ({"cpu_cores": "0|1"}, "has cores for 2 ranks, but tensor_parallel_size is 1"),
            ({"cpu_cores": "0", "num_threads": 2}, "num_threads is 2, but cpu_cores = '0' has 1"),
        ],
    )
    def test_cores_that_do_not_suit_the_ranks(self, changes: dict[str, Any], message: str) -> None:
        self.check("speculation", {"speculation": SPECULATION | changes}, message)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_seqs_buckets": []}, r"num_seqs_buckets = \(\) must be ascending"),
            ({"num_seqs_buckets": [4, 2]}, r"num_seqs_buckets = .* must be ascending"),
            ({"num_seqs_buckets": [0, 8]}, r"num_seqs_buckets = .* ascending positive numbers"),
            ({"context_buckets": []}, r"context_buckets = \(\) must be ascending"),
            ({"context_buckets": [512, 128, 2048]}, r"context_buckets = .* must be ascending"),
            ({"context_buckets": [128, 1024]}, r"context_buckets = .* ends below 2048"),
            (
                {"context_buckets": [128, 4096]},
                r"context_buckets = .* must end with max_model_len = 2048",
            ),
        ],
    )
    def test_buckets_that_do_not_cover_what_is_served(
        self, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValidationError, match=message):
            parse(**changes)

    def check(self, field: str, changes: dict[str, Any], message: str | None = None) -> None:
        with pytest.raises(ValidationError, match=message) as refusal:
            parse(**changes)
        assert [".".join(map(str, error["loc"])) for error in refusal.value.errors()] == [field]


class TestNeuron:
    TARGET = {"model": "t", "tensor_parallel_size": 8, "neuron_cores": "0-7"}

    def parse(self, **changes: Any) -> AppArgs:
        return parse(target=self.TARGET, device="neuron", all_greedy=True, **changes)

    def test_every_replica_of_a_node_may_have_cores_of_its_own(self) -> None:
        args = self.parse(speculation=SPECULATION | {"neuron_cores": "8-14"})
        assert args.target.core_map().firsts == (0,)
        assert args.speculation.core_map().firsts == tuple(range(8, 15))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"target": {"model": "t"}}, r"target\.neuron_cores is missing; name the logical"),
            ({"speculation": SPECULATION}, r"speculation\.neuron_cores is missing"),
            ({"speculation": SPECULATION | {"neuron_cores": "7"}}, "share 7; a core belongs to"),
            ({"target": TARGET | {"neuron_cores": "0-6"}}, "are 7 cores; .* needs 8"),
            ({"target": TARGET | {"neuron_cores": "4-11"}}, "start at a multiple of 8"),
            ({"all_greedy": False}, "sampling is not among the graphs .* set all_greedy: true"),
        ],
    )
    def test_what_cannot_run_there_is_refused(self, changes: dict[str, Any], message: str) -> None:
        made = {"target": self.TARGET, "device": "neuron", "all_greedy": True} | changes
        with pytest.raises(ValidationError, match=message):
            parse(**made)

    def test_on_a_cpu_the_same_cores_are_only_read(self) -> None:
        assert parse(target=self.TARGET).target.core_map() is not None


class TestShapes:
    def test_they_follow_from_the_args(self) -> None:
        shapes = parse(
            speculation=SPECULATION, max_num_seqs=6, max_model_len=1000, prefill_chunk_size=64
        ).shapes(6)
        assert (shapes.num_slots, shapes.max_model_len) == (6, 1000)
        assert (shapes.num_drafts, shapes.prefill_chunk) == (7, 64)
        assert shapes.num_seqs_buckets == (1, 2, 4, 6)
        assert shapes.context_buckets == (128, 256, 512, 1000)

    def test_buckets_may_be_named(self) -> None:
        args = parse(max_num_seqs=8, num_seqs_buckets=[3, 8], context_buckets=[500, 2048])
        shapes = args.shapes(8)
        assert shapes.num_seqs_buckets == (3, 8)
        assert shapes.context_buckets == (500, 2048)

    def test_named_batch_sizes_go_on_doubling_for_a_drafter_of_several_verifiers(self) -> None:
        args = parse(max_num_seqs=8, num_seqs_buckets=[3, 8])
        assert args.shapes(24).num_seqs_buckets == (3, 8, 16, 24)

    def test_a_chunk_is_never_longer_than_the_context(self) -> None:
        assert parse(max_model_len=100, prefill_chunk_size=256).shapes(1).prefill_chunk == 100
