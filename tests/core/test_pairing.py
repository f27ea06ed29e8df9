"""A pair that does not fit is refused before anything starts, with both values and a remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_core.config import drafter_config, target_config
from dflash_core.errors import PairingError
from dflash_core.pairing import validate_pair
from tests.core.test_config import DRAFTER, LLAMA_31_8B

TARGET = target_config(LLAMA_31_8B)
DRAFT = drafter_config(DRAFTER)
OPTIONS = {
    "num_speculative_tokens": 9,
    "target_tp": 8,
    "drafter_tp": 8,
    "max_model_len": 8192,
}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32])
def test_the_published_pair_fits(ranks):
    """From 16 ranks on, the 8 key/value heads are replicated."""
    validate_pair(TARGET, DRAFT, **OPTIONS | {"target_tp": ranks, "drafter_tp": ranks})


def test_no_speculation_fits_with_and_without_a_drafter():
    validate_pair(TARGET, DRAFT, **OPTIONS | {"num_speculative_tokens": 0})
    validate_pair(TARGET, None, **OPTIONS | {"num_speculative_tokens": 0})


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"hidden_size": 2560}, "hidden_size: the drafter's is 2560, but the target's is 4096"),
        ({"vocab_size": 151936}, "vocab_size: the drafter's is 151936, .* 128256"),
        ({"num_target_layers": 36}, "num_target_layers: the drafter's is 36, .* 32"),
        ({"target_layer_ids": (1, 32)}, r"taps layer 32, but the target has layers 0\.\.31"),
        ({"mask_token_id": 128256}, "mask_token_id: .* 128256, .* vocab_size is 128256"),
    ],
)
def test_a_drafter_for_another_target(drafter, message):
    with pytest.raises(PairingError, match=f"{message}.*the drafter that was trained"):
        validate_pair(TARGET, replace(DRAFT, **drafter), **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 10}, "is 10, .* block_size 10 .* num_speculative_tokens <= 9"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"target_tp": 0}, "tensor_parallel_size of the target is 0"),
        ({"target_tp": 3}, "of the target is 3, but num_attention_heads 32"),
        ({"drafter_tp": 64}, "of the drafter is 64, but num_attention_heads 32"),
        ({"max_model_len": 131073}, "max_model_len is 131073, .* target is 131072"),
        ({"max_model_len": 0}, "max_model_len is 0"),
    ],
)
def test_options_that_the_models_cannot_serve(options, message):
    with pytest.raises(PairingError, match=message):
        validate_pair(TARGET, DRAFT, **OPTIONS | options)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"intermediate_size": 14340}, "intermediate_size 14340 is not a multiple"),
        ({"num_kv_heads": 3, "num_heads": 24}, "num_key_value_heads 3 is neither"),
    ],
)
def test_every_split_dimension_divides(target, message):
    with pytest.raises(PairingError, match=message):
        validate_pair(replace(TARGET, **target), DRAFT, **OPTIONS)


def test_the_vocabulary_divides_by_the_ranks_of_both():
    target, drafter = (replace(config, vocab_size=128260) for config in (TARGET, DRAFT))
    validate_pair(target, drafter, **OPTIONS | {"target_tp": 4, "drafter_tp": 4})
    for ranks in ({"target_tp": 8, "drafter_tp": 4}, {"target_tp": 4, "drafter_tp": 8}):
        with pytest.raises(PairingError, match="vocab_size 128260 is not a multiple"):
            validate_pair(target, drafter, **OPTIONS | ranks)


def test_a_drafter_with_a_shorter_context():
    shorter = replace(DRAFT, max_position_embeddings=4096)
    with pytest.raises(PairingError, match="max_model_len is 8192, .* drafter is 4096"):
        validate_pair(TARGET, shorter, **OPTIONS)


def test_drafts_without_a_drafter():
    with pytest.raises(PairingError, match="num_speculative_tokens is 9 but there is no drafter"):
        validate_pair(TARGET, None, **OPTIONS)
