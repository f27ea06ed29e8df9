"""The real pair's files at TP8: every rank's slices, from checkpoints that are true in shape."""

from __future__ import annotations

import json
from collections import defaultdict
from math import prod
from pathlib import Path

import pytest
import torch

from dflash_core.checkpoint import Checkpoint, load_drafter_config, load_target_config
from dflash_core.config import drafter_config, target_config
from dflash_core.drafter import DFlashDrafter, TargetVocabulary
from dflash_core.errors import CheckpointError, ConfigError
from dflash_core.loading import Piece, shard_plan
from dflash_core.pairing import validate_pair
from dflash_core.parallel import SINGLE, TensorParallel
from dflash_core.target import LlamaTarget
from tests import published

RANKS = 8
MAX_MODEL_LEN = 2048


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("published")
    return (
        published.write_sparse_target(folder / "target"),
        published.write_sparse_drafter(folder / "drafter"),
    )


def target_plan(folder: Path, tp: TensorParallel) -> list[Piece]:
    with torch.device("meta"):
        model = LlamaTarget(load_target_config(folder), max_model_len=MAX_MODEL_LEN, tp=tp)
    return shard_plan(model, Checkpoint(folder), prefix="model.")


def drafter_plan(folder: Path, tp: TensorParallel) -> list[Piece]:
    with torch.device("meta"):
        model = DFlashDrafter(load_drafter_config(folder), max_model_len=MAX_MODEL_LEN, tp=tp)
    return shard_plan(model, Checkpoint(folder))


def rank(number: int, size: int = RANKS) -> TensorParallel:
    return TensorParallel(number, size, group=object()) if size > 1 else SINGLE


def test_sizes_are_those_that_were_published(pair: tuple[Path, Path]) -> None:
    whole = sum(prod(piece.shape) for piece in target_plan(pair[0], SINGLE))
    assert 2 * whole == published.TARGET_BYTES
    drafter = drafter_plan(pair[1], SINGLE)
    assert len(drafter) == 58
    assert sum(prod(piece.shape) for piece in drafter) == published.DRAFTER_PARAMETERS


def test_the_published_pair_fits_the_published_options(pair: tuple[Path, Path]) -> None:
    validate_pair(
        load_target_config(pair[0]),
        load_drafter_config(pair[1]),
        num_speculative_tokens=9,
        target_tp=8,
        drafter_tp=1,
        max_model_len=MAX_MODEL_LEN,
    )


@pytest.mark.parametrize("make", [target_plan, drafter_plan])
def test_the_slices_of_eight_ranks_tile_every_tensor(make, pair: tuple[Path, Path]) -> None:
    """Each row of a split tensor is on one rank; what is not split is whole on all."""
    folder = pair[make is drafter_plan]
    checkpoint = Checkpoint(folder)
    slices: dict[str, list[tuple[int, int]]] = defaultdict(list)
    dims: dict[str, set[int | None]] = defaultdict(set)
    for number in range(RANKS):
        for piece in make(folder, rank(number)):
            dims[piece.tensor].add(piece.shard.dim)
            slices[piece.tensor].append((piece.shard.start, piece.shard.length))
    assert slices.keys() == checkpoint.names()
    for tensor, pieces in slices.items():
        [dim] = dims[tensor]
        if dim is None:
            continue
        length = checkpoint.shape(tensor)[dim] // RANKS
        assert pieces == [(number * length, length) for number in range(RANKS)], tensor
    replicated = {tensor for tensor, [dim] in dims.items() if dim is None}
    assert all("norm" in tensor or tensor == "fc.weight" for tensor in replicated)


def test_a_rank_has_a_whole_key_value_head(pair: tuple[Path, Path]) -> None:
    shapes = {piece.parameter: piece.shape for piece in target_plan(pair[0], rank(7))}
    assert shapes["layers.31.self_attn.q_proj.weight"] == (4 * 128, 4096)
    assert shapes["layers.31.self_attn.k_proj.weight"] == (128, 4096)
    assert shapes["layers.31.self_attn.o_proj.weight"] == (4096, 4 * 128)
    assert shapes["layers.31.mlp.down_proj.weight"] == (4096, 1792)
    assert shapes["embed_tokens.weight"] == shapes["lm_head.weight"] == (16032, 4096)


def test_more_ranks_than_key_value_heads_share_them(pair: tuple[Path, Path]) -> None:
    name = "layers.0.self_attn.k_proj.weight"
    starts = []
    for number in range(32):
        [piece] = [
            each for each in target_plan(pair[0], rank(number, 32)) if each.parameter == name
        ]
        assert piece.shape == (128, 4096)
        starts.append(piece.shard.start // 128)
    assert starts == [number // 4 for number in range(32)]


def test_slices_are_read_from_the_file_that_holds_them(pair: tuple[Path, Path]) -> None:
    checkpoint = Checkpoint(pair[0])
    wanted = {"embed_tokens.weight", "layers.16.self_attn.o_proj.weight", "norm.weight"}
    for number in (0, RANKS - 1):
        for piece in target_plan(pair[0], rank(number)):
            if piece.parameter in wanted:
                shard = piece.shard
                read = checkpoint.read(
                    piece.tensor, dim=shard.dim, start=shard.start, length=shard.length or None
                )
                assert tuple(read.shape) == piece.shape
                assert read.dtype == torch.bfloat16


def test_the_drafter_borrows_embedding_and_head_from_the_target(pair: tuple[Path, Path]) -> None:
    with torch.device("meta"):
        vocabulary = TargetVocabulary(128256, 4096, tie_word_embeddings=False)
    plan = shard_plan(vocabulary, Checkpoint(pair[0]), prefix="model.", partial=True)
    assert {piece.tensor for piece in plan} == {"model.embed_tokens.weight", "lm_head.weight"}


def test_a_drafter_of_another_width_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The config of the first releases had the target's intermediate size."""
    (tmp_path / "model.safetensors").symlink_to(pair[1] / "model.safetensors")
    config = published.DRAFTER | {"intermediate_size": 14336}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"gives this rank shape .*12288.* implies .*14336"):
        drafter_plan(tmp_path, SINGLE)


OPTIONAL = {
    "model_type",  # not looked at: `architectures` decides
    "hidden_act",  # absent is silu, and nothing else is accepted
    "torch_dtype",  # of the file's tensors, which carry their own
    "rope_scaling",  # null is none
    "attention_bias",  # these five are false where they are absent, as in transformers
    "mlp_bias",
    "tie_word_embeddings",
    "use_sliding_window",
    "sliding_window",
    "head_dim",  # of the target: hidden size / heads
    "num_key_value_heads",  # absent is multi-head attention
    "bos_token_id",
}


@pytest.mark.parametrize("name", sorted(published.TARGET.keys() - OPTIONAL))
def test_a_field_that_the_target_lacks_is_an_error(name: str) -> None:
    raw = {key: value for key, value in published.TARGET.items() if key != name}
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        target_config(raw)


@pytest.mark.parametrize(
    "name",
    sorted(published.DRAFTER.keys() - OPTIONAL - {"dflash_config"}) + ["head_dim", "mask_token_id"],
)
def test_a_field_that_the_drafter_lacks_is_an_error(name: str) -> None:
    raw = {key: value for key, value in published.DRAFTER.items() if key != name}
    nested = published.DRAFTER["dflash_config"]
    raw["dflash_config"] = {key: value for key, value in nested.items() if key != name}
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        drafter_config(raw)
