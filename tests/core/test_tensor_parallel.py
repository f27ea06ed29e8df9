"""Tensor parallelism changes where the numbers are computed, not the tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing

from dflash_core.drafter_runner import DrafterRunner
from dflash_core.engine import generate
from dflash_core.parallel import SINGLE, TensorParallel, parallel_argmax, split
from dflash_core.request import GenerationRequest
from dflash_core.runtime import open_store
from dflash_core.shapes import StaticShapes
from dflash_core.stopping import Stopping
from dflash_core.target_runner import TargetRunner
from tests.core.test_drafter import TAPS
from tests.core.test_target import LLAMA3, transformers_model
from tests.drafters import record_drafts
from tests.ranks import rank_of_group
from tests.tiny import write_drafter

SHAPES = StaticShapes.create(num_slots=2, max_model_len=64, num_drafts=5, prefill_chunk=16)
PROMPTS = [[3, 4, 5, 6, 7, 8], list(range(20, 50)), [9]]


def run_rank(rank: int, size: int, port: int, folder: str, target_tp: int, drafter_tp: int) -> None:
    """One process of the group: generate, rank 0 writes what came out."""
    with rank_of_group(rank, size, port) as group:
        root = Path(folder)
        target = TargetRunner.load(
            root / "target",
            SHAPES,
            tapped_layers=TAPS,
            dtype=torch.float32,
            tp=group if target_tp > 1 else SINGLE,
        )
        drafter = DrafterRunner.load(
            root / "drafter",
            root / "target",
            SHAPES,
            dtype=torch.float32,
            tp=group if drafter_tp > 1 else SINGLE,
        )
        tokenizer = json_tokenizer()
        drafts = record_drafts(drafter)

        def make(prompt: list[int]) -> Stopping:
            request = GenerationRequest("test", prompt, 12)
            return Stopping(tokenizer, request, eos_token_ids=(), max_model_len=64)

        outputs = generate(target, drafter, PROMPTS, make)
        if rank == 0:
            result = {"tokens": [output.token_ids for output in outputs], "drafts": drafts}
            (root / f"tp{target_tp}-{drafter_tp}.json").write_text(json.dumps(result))


def json_tokenizer():
    """Any tokenizer will do: only ids are compared."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({str(i): i for i in range(131)}, unk_token="0"))


def run(folder: Path, target_tp: int, drafter_tp: int) -> dict[str, list[list[int]]]:
    size = max(target_tp, drafter_tp)
    store = open_store()
    multiprocessing.spawn(
        run_rank, (size, store.port, str(folder), target_tp, drafter_tp), nprocs=size
    )
    return json.loads((folder / f"tp{target_tp}-{drafter_tp}.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    transformers_model(
        folder / "target",
        vocab_size=136,
        num_attention_heads=8,
        num_key_value_heads=4,
        rope_parameters=LLAMA3,
    )
    write_drafter(
        folder / "drafter",
        folder / "target",
        target_layer_ids=TAPS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return folder


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, list[list[int]]]:
    return run(folder, 1, 1)


def test_a_target_on_two_ranks_gives_the_tokens_of_one(folder: Path, single: dict) -> None:
    assert run(folder, 2, 1)["tokens"] == single["tokens"]


def test_a_target_on_eight_ranks_replicates_its_four_key_value_heads(
    folder: Path, single: dict
) -> None:
    assert run(folder, 8, 1)["tokens"] == single["tokens"]


def test_a_drafter_on_two_ranks_gives_the_drafts_of_one(folder: Path, single: dict) -> None:
    both = run(folder, 1, 2)
    assert both["drafts"] == single["drafts"]
    assert len(set(map(tuple, both["drafts"]))) > 5


def test_a_rank_holds_only_its_slice(folder: Path) -> None:
    whole = TargetRunner.load(folder / "target", SHAPES, dtype=torch.float32).model
    tp = TensorParallel(1, 2, group=object())
    part = TargetRunner.load(folder / "target", SHAPES, dtype=torch.float32, tp=tp).model
    q, o = part.layers[0].self_attn.q_proj, part.layers[0].self_attn.o_proj
    assert torch.equal(q.weight, whole.layers[0].self_attn.q_proj.weight[32:])
    assert torch.equal(o.weight, whole.layers[0].self_attn.o_proj.weight[:, 32:])
    assert torch.equal(part.embed_tokens.weight, whole.embed_tokens.weight[68:])


def test_ranks_share_a_key_value_head_where_there_are_fewer_heads() -> None:
    starts = [split(4, TensorParallel(r, 8, object()), "heads", shards=4).start for r in range(8)]
    assert starts == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_size_that_cannot_be_split_names_itself() -> None:
    with pytest.raises(ValueError, match="vocab_size = 131 cannot be split over 2"):
        split(131, TensorParallel(0, 2, object()), "vocab_size")


@pytest.mark.parametrize("vocabulary", [131, 256, 1280])
def test_argmax_is_the_lowest_of_equals(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # Few values, so that every row has its maximum many times over.
    logits = torch.randint(-9, 3, (3, 7, vocabulary), generator=generator).bfloat16()
    logits[0, 0] = -torch.inf
    for row, chosen in zip(
        logits.flatten(0, 1), parallel_argmax(logits, SINGLE).flatten(), strict=True
    ):
        assert chosen == row.tolist().index(row.max())


def test_argmax_of_one_rank_is_plain_argmax() -> None:
    logits = torch.tensor([[[0.0, 3.0, 3.0], [1.0, 0.5, 0.0]]])
    assert parallel_argmax(logits, SINGLE).tolist() == [[1, 0]]
