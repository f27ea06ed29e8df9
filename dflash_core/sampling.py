"""How the next token of a request is chosen: its parameters and its random numbers.

The randomness of a token is one uniform number, a function of (seed, index of the token in the
output) and of nothing else. Hence a request's tokens depend on its prompt, parameters and seed
only: not on its neighbours, the slot, the batch size, the drafts or whether there are any. The
guarantee
ends where the numerics of the logits do: another batch or block shape may change the last bits of a
logit, and a token changes when its uniform number falls between the two results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

GREEDY_BELOW = 1e-5  # temperatures below it mean greedy, as in vLLM
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024  # entries; they travel with every step
MAX_ABS_BIAS = 100.0
SEED_BITS = 64

# SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
UNIFORM_BITS = 24  # what float32 holds exactly


class InvalidSampling(ValueError):
    """A sampling parameter is out of range. `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field

    def __str__(self) -> str:
        return f"{self.field} {self.args[1]}"


@dataclass(frozen=True)
class SamplingParams:
    """What is done to the target's logits before a token is taken from them.

    Names, ranges, meanings and order are vLLM's: min_tokens and logit_bias, penalties, then (not
    for greedy requests) temperature, min_p, top_k, top_p.

    Attributes:
        temperature: >= 0; below 1e-5 the most likely token is taken.
        top_p: (0, 1], the smallest set of most likely tokens with that much probability.
        top_k: that many most likely tokens; 0 or -1 for all.
        min_p: [0, 1], at least that share of the most likely token's probability.
        repetition_penalty: > 0, on tokens of the prompt and the output.
        presence_penalty, frequency_penalty: [-2, 2], on tokens of the output.
        logit_bias: added to the logits of these token ids, [-100, 100].
        min_tokens: nothing ends the output before it has that many tokens.
        seed: of the uniform numbers; two's complement of 64 bits.
        logprobs: report the log probability of every token, of the raw logits, and that many most
            likely alternatives; None for nothing.

    Raises:
        InvalidSampling: naming the parameter, its value and the range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            if not math.isfinite(getattr(self, name)):
                raise InvalidSampling(name, f"is {getattr(self, name)}: it must be a finite number")
        self._check("temperature", self.temperature >= 0, "at least 0")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for all tokens")
        self._check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._check("repetition_penalty", self.repetition_penalty > 0, "above 0")
        self._check("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2")
        self._check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2")
        self._check("min_tokens", self.min_tokens >= 0, "at least 0")
        self._check("seed", -(1 << 63) <= self.seed < 1 << 63, "a signed 64-bit integer")
        if self.logprobs is not None:
            self._check("logprobs", 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidSampling(
                "logit_bias",
                f"has {len(self.logit_bias)} entries: at most {MAX_LOGIT_BIAS} are taken",
            )
        for token, bias in self.logit_bias.items():
            if token < 0 or not abs(bias) <= MAX_ABS_BIAS:
                raise InvalidSampling(
                    "logit_bias",
                    f"gives token {token} a bias of {bias}: token ids are >= 0 and biases between "
                    f"-{MAX_ABS_BIAS:g} and {MAX_ABS_BIAS:g}",
                )

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise InvalidSampling(name, f"is {getattr(self, name)}: it must be {allowed}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def beyond_argmax(self) -> tuple[str, ...]:
        """Names of the parameters that the plain argmax of the logits cannot satisfy."""
        if not self.greedy:
            return ("temperature",)
        unused = {"temperature", "top_p", "top_k", "min_p", "seed"}
        return tuple(
            item.name
            for item in fields(self)
            if item.name not in unused and getattr(self, item.name) != getattr(GREEDY, item.name)
        )


GREEDY = SamplingParams()


def uniforms(seeds: Sequence[int], first: Sequence[int], count: int) -> np.ndarray:
    """The uniform numbers of the output tokens `first .. first + count - 1` of B sequences.

    Returns:
        float32 `[B, count]`, multiples of 2^-24 in [0, 1).
    """
    index_BL = np.array(first, dtype=np.uint64)[:, None] + np.arange(1, count + 1, dtype=np.uint64)
    bits_BL = _mix(_mix(_unsigned(seeds))[:, None] + index_BL * GOLDEN_GAMMA)
    return (bits_BL >> np.uint64(64 - UNIFORM_BITS)).astype(np.float32) * np.float32(
        2.0**-UNIFORM_BITS
    )


def choice_seed(seed: int, choice: int) -> int:
    """Seed of one of several choices for the same prompt; choice 0 has the request's own."""
    if choice == 0:
        return seed
    bits = _mix(_unsigned([seed]) ^ _mix(_unsigned([choice])))
    return int(bits[0].astype(np.int64))


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """The defaults that a checkpoint's generation_config.json sets, those that vLLM heeds too.

    Raises:
        InvalidSampling: a value is no number or out of range.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {
        name: generation_config[name] for name in names if generation_config.get(name) is not None
    }
    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidSampling(name, f"is {value!r}: it must be a number")
    SamplingParams(**defaults)
    return defaults


def _unsigned(values: Sequence[int]) -> np.ndarray:
    return np.array([value % (1 << SEED_BITS) for value in values], dtype=np.uint64)


def _mix(bits: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64: a bijection of 64 bits; arrays wrap around silently."""
    bits = (bits ^ (bits >> np.uint64(30))) * MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * MIX_2
    return bits ^ (bits >> np.uint64(31))
