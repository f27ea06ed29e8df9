"""A second, deliberately plain sampler: one distribution at a time, float64, loops over tokens."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from dflash_core.sampling import SamplingParams


def processed_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    ending: Collection[int] = (),
) -> list[float]:
    """What greedy decoding looks at: `[V]` logits after min_tokens, logit_bias and penalties."""
    result = []
    for token, raw in enumerate(logits):
        x = float(raw) + params.logit_bias.get(token, 0.0)
        if token in ending and len(output) < params.min_tokens:
            x = -math.inf
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token)
        x -= params.presence_penalty * (token in output)
        result.append(x)
    return result


def distribution(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    ending: Collection[int] = (),
) -> np.ndarray:
    """`[V]` probabilities of the token that follows `prompt + output`."""
    x = processed_logits(logits, params, prompt, output, ending)
    if params.greedy:
        return np.eye(len(x))[int(np.argmax(x))]
    top = max(x)
    p = np.array([math.exp((each - top) / params.temperature) for each in x])
    p[p < params.min_p * p.max()] = 0
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: -p[token])
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    kept, mass = [], 0.0
    for token in order:
        if mass < params.top_p:
            kept.append(token)
            mass += p[token]
    p[[token for token in order if token not in kept]] = 0
    return p / p.sum()
