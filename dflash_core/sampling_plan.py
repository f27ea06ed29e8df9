"""The sampling part of a verify plan, from the sequences' parameters and tokens."""

from __future__ import annotations

import numpy as np

from dflash_core.messages import SamplingPlan
from dflash_core.sampling import GREEDY, SamplingParams, uniforms
from dflash_core.sequence import Sequence

INT32_MAX = np.iinfo(np.int32).max
# What logits are multiplied with or divided by stays within float32; more makes no difference.
FACTOR_MAX = 1e6


def sampling_plan(
    sequences: list[Sequence], blocks: list[list[int]], rows: int
) -> SamplingPlan | None:
    """How the step over `blocks` chooses tokens; None where argmax is all that is asked for.

    Args:
        sequences: of the step, in order.
        blocks: their tokens; of a piece of the prompt only the last row's distribution is used.
        rows: distributions per sequence (L).
    """
    # The token after a piece of the prompt that is not the last one is thrown away.
    params = [
        GREEDY if sequence.num_computed + len(block) < sequence.prefill_end else sequence.sampling
        for sequence, block in zip(sequences, blocks, strict=True)
    ]
    if not any(each.beyond_argmax for each in params):
        return None

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(each, name) for each in params], dtype=dtype)

    first = [sequence.num_output_tokens for sequence in sequences]
    histories = [_history(sequence, each) for sequence, each in zip(sequences, params, strict=True)]
    biases = [list(each.logit_bias) for each in params]
    missing = [
        max(0, min(each.min_tokens - done, rows)) for each, done in zip(params, first, strict=True)
    ]
    banned = [
        sorted(token for token in sequence.stopping.ending_token_ids if token <= INT32_MAX)
        if count
        else []
        for sequence, count in zip(sequences, missing, strict=True)
    ]
    return SamplingPlan(
        temperature=np.array(
            [0.0 if each.greedy else min(each.temperature, FACTOR_MAX) for each in params],
            dtype=np.float32,
        ),
        top_p=column("top_p", np.float32),
        top_k=np.array([max(0, min(each.top_k, INT32_MAX)) for each in params], dtype=np.int32),
        min_p=column("min_p", np.float32),
        repetition=column("repetition_penalty", np.float64)
        .clip(1 / FACTOR_MAX, FACTOR_MAX)
        .astype(np.float32),
        presence=column("presence_penalty", np.float32),
        frequency=column("frequency_penalty", np.float32),
        uniforms=uniforms([each.seed for each in params], first, rows),
        history_rows=_repeated(histories),
        history_tokens=np.concatenate(histories),
        history_output=np.concatenate(
            [
                np.arange(len(tokens)) >= len(tokens) - done
                for tokens, done in zip(histories, first, strict=True)
            ]
        ),
        bias_rows=_repeated(biases),
        bias_tokens=_joined(biases, np.int32),
        bias_values=_joined([list(each.logit_bias.values()) for each in params], np.float32),
        banned_rows=_repeated(banned),
        banned_tokens=_joined(banned, np.int32),
        banned_lengths=np.array(missing, dtype=np.int32),
        num_logprobs=np.array(
            [-1 if each.logprobs is None else each.logprobs for each in params], dtype=np.int32
        ),
    )


def _history(sequence: Sequence, params: SamplingParams) -> np.ndarray:
    """The tokens that this request's penalties look at: of the prompt, where one does, and of the
    output."""
    if not params.penalised:
        return np.zeros(0, dtype=np.int32)
    first = 0 if params.repetition_penalty != 1 else len(sequence.prompt)
    return np.array(sequence.tokens[first:], dtype=np.int32)


def _repeated(lists: list[list[int]] | list[np.ndarray]) -> np.ndarray:
    """Which list each item of the joined lists comes from."""
    return np.repeat(np.arange(len(lists), dtype=np.int32), [len(each) for each in lists])


def _joined(lists: list[list], dtype: type) -> np.ndarray:
    return np.array([item for each in lists for item in each], dtype=dtype)
