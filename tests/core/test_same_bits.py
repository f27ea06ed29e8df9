"""In bf16 on the CPU a token has the same logits, bit for bit, whatever else its step holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_core.attention import attention_mask, grouped_attention
from dflash_core.cpu import kernels
from dflash_core.cpu.rounding import attention_length
from dflash_core.messages import VerifyPlan
from dflash_core.shapes import StaticShapes
from dflash_core.target_runner import TargetRunner
from tests.tiny import write_target

SHAPES = StaticShapes.create(num_slots=4, max_model_len=512, num_drafts=7, prefill_chunk=64)
PROMPT, BLOCK = 60, 8  # the block crosses the context bucket of 128 for some sequences


def test_attention_lengths_keep_out_of_the_lengths_that_differ() -> None:
    assert [attention_length(n) for n in (1, 128, 129, 256, 384, 385, 512)] == [
        128, 128, 384, 384, 384, 512, 512,
    ]  # fmt: skip
    assert [attention_length(n) for n in (513, 640, 768, 1000, 2048)] == [640, 640, 896, 1024, 2048]


def test_attention_does_not_depend_on_the_block_or_on_the_bucket() -> None:
    """Many samples: the kernels' other orders of summing up change 1 result in some 1000."""
    generator = torch.Generator().manual_seed(0)
    L, N, G, D, longest = 8, 9, 3, 64, 1024

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    def attend(q: torch.Tensor, positions: torch.Tensor, context: int) -> torch.Tensor:
        visible = torch.arange(context) <= positions[None, :, None]
        mask = attention_mask(visible, torch.bfloat16, N // G)
        return grouped_attention(q, keys[:, :context], values[:, :context], mask)

    for sample in range(60):
        keys, values = random(1, longest, G, D), random(1, longest, G, D)
        q = 3 * random(1, L, N, D)
        first = (90, 230, 290, 700)[sample % 4]
        positions = first + torch.arange(L)
        expected = attend(q, positions, longest)
        for bucket in (128, 256, 320, 512, 768):
            if bucket >= first + L:
                assert torch.equal(attend(q, positions, attention_length(bucket)), expected)
        for row in (0, L - 1):
            one = attend(q[:, row : row + 1], positions[row : row + 1], longest)
            assert torch.equal(one[:, 0], expected[:, row])


@pytest.mark.parametrize("with_kernels", [True, False])
def test_features_do_not_depend_on_the_shape_of_the_step(
    with_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feature of the last layer stands for all that was computed before it."""
    if not with_kernels:
        monkeypatch.setattr(kernels, "usable", lambda dtype, device: False)
    elif not kernels.usable(torch.bfloat16, torch.device("cpu")):
        pytest.skip("the kernels need AVX2 and a C compiler")
    folder = write_target(
        tmp_path / "target", hidden_size=192, intermediate_size=1536, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    runner = TargetRunner.load(folder, SHAPES, tapped_layers=(2, 5), dtype=torch.bfloat16)
    rng = np.random.default_rng(0)
    lengths = {0: PROMPT, 1: 124, 2: 250, 3: 5}  # tokens before the block
    tokens = {slot: rng.integers(3, 256, 300).astype(np.int32) for slot in lengths}

    def run(slots: list[int], offset: int, count: int, prefill: bool = False) -> list[bytes]:
        starts = np.array([offset if prefill else lengths[s] + offset for s in slots], np.int32)
        block = np.stack([tokens[s][b : b + count] for s, b in zip(slots, starts, strict=True)])
        counts = np.full(len(slots), count, np.int32)
        plan = VerifyPlan(block, np.array(slots, np.int32), starts, counts, prefill, True)
        inputs = runner._inputs(plan)
        context = runner._attention_length(
            next(c for c in SHAPES.context_buckets if c >= int((starts + counts).max()))
        )
        with torch.inference_mode():
            output = runner.step(*inputs, context)
        rows = output.features_BLF[: len(slots), :count]
        return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows.flatten(0, 1)]

    for slot, length in lengths.items():
        run([slot], 0, length, prefill=True)
    alone = {(slot, row): run([slot], row, 1)[0] for slot in lengths for row in range(BLOCK)}
    for slots in ([0], [1], [2], [3], [0, 1], [3, 0], [2, 1, 0, 3], [0, 1, 2, 3]):
        verified = run(slots, 0, BLOCK)
        expected = [alone[slot, row] for slot in slots for row in range(BLOCK)]
        assert verified == expected
        assert [run(slots, 3, 1)[i] for i in range(len(slots))] == [alone[s, 3] for s in slots]
    assert len(set(alone.values())) == len(alone)
