"""The drafter with its cache says what the plain reference says without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_core.checkpoint import load_drafter_config
from dflash_core.drafter_runner import DrafterRunner
from dflash_core.messages import DraftPlan, Features
from dflash_core.shapes import StaticShapes
from tests import reference
from tests.core.test_target import transformers_model
from tests.tiny import write_drafter

VOCAB, HIDDEN = 131, 64
SHAPES = StaticShapes.create(num_slots=4, max_model_len=64, num_drafts=5, prefill_chunk=16)
TAPS = (0, 1, 2)
WIDTH = len(TAPS) * HIDDEN
VARIANTS = {
    "full attention": {},
    "grouped-query": {"num_key_value_heads": 2},
    "multi-query": {"num_key_value_heads": 1},
    "sliding, causal in the block": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
    },
    "sliding, not causal": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 3,
        "is_causal": False,
    },
}


def plan(
    features: torch.Tensor | None,
    rows: list[tuple[int, int]],
    questions: list[tuple[int, int, int]],
    context_starts: list[int] | None = None,
) -> DraftPlan:
    """rows: (slot, position) of each feature; questions: (slot, start, token)."""

    def column(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    packed = None
    if features is not None:
        data = features.contiguous().view(torch.uint8).reshape(-1).numpy()
        packed = Features(data, len(features), WIDTH, str(features.dtype).removeprefix("torch."))
    return DraftPlan(
        features=packed,
        row_slots=column([slot for slot, _ in rows]),
        row_positions=column([position for _, position in rows]),
        tokens=column([token for _, _, token in questions]),
        slots=column([slot for slot, _, _ in questions]),
        starts=column([start for _, start, _ in questions]),
        context_starts=column(context_starts or [0] * len(questions)),
        num_drafts=SHAPES.num_drafts,
    )


class Pair:
    """A drafter under test beside its reference."""

    def __init__(self, folder: Path, **changes: object) -> None:
        transformers_model(folder / "target")
        write_drafter(folder / "drafter", folder / "target", target_layer_ids=TAPS, **changes)
        self.config = load_drafter_config(folder / "drafter")
        self.weights = load_file(folder / "drafter" / "model.safetensors")
        target = load_file(folder / "target" / "model.safetensors")
        self.embedding = target["model.embed_tokens.weight"]
        self.head = target["lm_head.weight"]
        self.runner = DrafterRunner.load(
            folder / "drafter", folder / "target", SHAPES, dtype=torch.float32
        )

    def expected(
        self, features: torch.Tensor, token: int, start: int, first_context: int = 0
    ) -> list[int]:
        return reference.draft(
            self.weights,
            self.config,
            self.embedding,
            self.head,
            features,
            token,
            start,
            SHAPES.num_drafts,
            first_context,
        )


def features_of(seed: int, length: int = 64) -> torch.Tensor:
    return torch.randn((length, WIDTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_of_a_batch_equal_the_reference_step_by_step(variant: str, tmp_path: Path) -> None:
    """Three sequences of different lengths, in slots of their own, advance at different speeds."""
    pair = Pair(tmp_path, **VARIANTS[variant])
    slots = {7: 3, 8: 0, 9: 1}  # feature seed -> slot
    ends = {7: 0, 8: 0, 9: 0}
    rng = np.random.default_rng(0)
    seen = set()
    for advance in ({7: 9, 8: 1, 9: 5}, {7: 1, 8: 6, 9: 2}, {7: 4, 9: 6}, {7: 1, 8: 1, 9: 1}):
        rows, parts, questions, expected = [], [], [], []
        for seed, count in advance.items():
            start = ends[seed] + count
            rows += [(slots[seed], position) for position in range(ends[seed], start)]
            parts.append(features_of(seed)[ends[seed] : start])
            token = int(rng.integers(VOCAB))
            questions.append((slots[seed], start, token))
            expected.append(pair.expected(features_of(seed), token, start))
            ends[seed] = start
        result = pair.runner.draft(plan(torch.cat(parts), rows, questions))
        assert result.tokens == expected
        seen.update(map(tuple, expected))
    assert len(seen) > 5, "drafts must depend on the context for this test to mean anything"


def test_rejected_positions_leave_no_trace(tmp_path: Path) -> None:
    """Features once injected at positions that were later redone are overwritten and masked."""
    pair = Pair(tmp_path)
    right, wrong = features_of(1), features_of(2)
    pair.runner.draft(plan(right[:10], [(0, p) for p in range(10)], [(0, 10, 5)]))
    pair.runner.draft(plan(wrong[10:16], [(0, p) for p in range(10, 16)], []))
    result = pair.runner.draft(plan(right[10:12], [(0, 10), (0, 11)], [(0, 12, 6)]))
    assert result.tokens == [pair.expected(right, 6, 12)]


def test_a_block_leaves_the_context_alone(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    features = features_of(1)
    pair.runner.draft(plan(features[:10], [(0, p) for p in range(10)], []))
    before = [keys.clone() for keys in pair.runner.cache.keys]
    pair.runner.draft(plan(None, [], [(0, 10, 5)]))
    for keys, kept in zip(pair.runner.cache.keys, before, strict=True):
        assert torch.equal(keys[0, :10], kept[0, :10])
        assert torch.equal(keys[1 : SHAPES.num_slots], kept[1 : SHAPES.num_slots])


def test_a_late_drafter_sees_only_what_was_injected(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    stale, features = features_of(2), features_of(1)
    pair.runner.draft(plan(stale[:16], [(0, p) for p in range(16)], []))
    rows = [(0, position) for position in range(20, 30)]
    result = pair.runner.draft(plan(features[20:30], rows, [(0, 30, 5)], context_starts=[20]))
    assert result.tokens == [pair.expected(features, 5, 30, first_context=20)]


def test_drafting_without_any_context_is_defined(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    result = pair.runner.draft(plan(None, [], [(0, 12, 5)], context_starts=[12]))
    assert result.tokens == [pair.expected(features_of(1), 5, 12, first_context=12)]


def test_features_of_another_width_or_dtype_are_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    data = np.zeros(HIDDEN * 4, dtype=np.uint8)
    one = np.zeros(1, dtype=np.int32)
    empty = np.zeros(0, dtype=np.int32)
    narrow = DraftPlan(
        Features(data, 1, HIDDEN, "float32"), one, one, empty, empty, empty, empty, 5
    )
    with pytest.raises(ValueError, match=f"takes width {WIDTH} and torch.float32"):
        pair.runner.draft(narrow)
