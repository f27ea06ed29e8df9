"""One step of the target as a graph: tensors in, a few integers (and features) out.

No Python value depends on a tensor and no shape on data, so that a step can be captured and
compiled once for each shape: batch B, block length L, `context_len`. Weights are parameters; the
key/value cache is the step's state, updated in place.

Shape legend: B sequences, L block length, V vocabulary, F features (tapped layers * hidden).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dflash_core import sampler
from dflash_core.kv_cache import KVCache
from dflash_core.parallel import gather_vocabulary, parallel_argmax
from dflash_core.sampler import SamplerInputs
from dflash_core.target import LlamaTarget
from dflash_core.verify import accept


class StepOutput(NamedTuple):
    """What a step of the target says.

    Attributes:
        chosen_BL: int32, the target's own token at every row.
        accepted_B: int32, leading drafts that equal it.
        features_BLF: model dtype; F = 0 without tapped layers.
        logits_BLV: raw logits of a sampled step, for log probabilities; else None.
    """

    chosen_BL: Tensor
    accepted_B: Tensor
    features_BLF: Tensor
    logits_BLV: Tensor | None = None


class TargetStep(nn.Module):
    """Verify a block per sequence: forward, head, argmax or sampling, accept.

    Args:
        model: this rank's share of the target.
        cache: its keys and values.
    """

    def __init__(self, model: LlamaTarget, cache: KVCache) -> None:
        super().__init__()
        self.model = model
        self.cache = cache

    def forward(
        self,
        tokens_BL: Tensor,
        slots_B: Tensor,
        starts_B: Tensor,
        lengths_B: Tensor,
        context_len: int,
        sampling: SamplerInputs | None = None,
    ) -> StepOutput:
        """Args as `LlamaTarget.forward`; `sampling` None means that every token is an argmax."""
        hidden_BLH, features_BLF = self.model(
            tokens_BL, slots_B, starts_B, lengths_B, self.cache, context_len
        )
        chosen_BL, logits_BLV = choose(self.model, hidden_BLH, tokens_BL, sampling)
        accepted_B = accept(tokens_BL, lengths_B, chosen_BL)
        return StepOutput(chosen_BL, accepted_B, features_BLF, logits_BLV)


class PrefillStep(nn.Module):
    """Run a piece of each prompt; only the distribution after its last token is computed.

    Args:
        model: this rank's share of the target.
        cache: its keys and values.
    """

    def __init__(self, model: LlamaTarget, cache: KVCache) -> None:
        super().__init__()
        self.model = model
        self.cache = cache

    def forward(
        self,
        tokens_BL: Tensor,
        slots_B: Tensor,
        starts_B: Tensor,
        lengths_B: Tensor,
        context_len: int,
        sampling: SamplerInputs | None = None,
    ) -> StepOutput:
        """As `TargetStep.forward`, with one row chosen: `[B, 1]`, and nothing to accept."""
        hidden_BLH, features_BLF = self.model(
            tokens_BL, slots_B, starts_B, lengths_B, self.cache, context_len
        )
        B, _, H = hidden_BLH.shape
        last_B1H = (lengths_B.long() - 1).view(B, 1, 1).expand(B, 1, H)
        hidden_B1H = hidden_BLH.gather(1, last_B1H)
        chosen_B1, logits_B1V = choose(self.model, hidden_B1H, tokens_BL[:, :1], sampling)
        return StepOutput(chosen_B1, torch.zeros_like(lengths_B), features_BLF, logits_B1V)


def choose(
    model: LlamaTarget, hidden_BLH: Tensor, tokens_BL: Tensor, sampling: SamplerInputs | None
) -> tuple[Tensor, Tensor | None]:
    """Tokens int32 `[B, L]` and, where they are sampled, the raw logits `[B, L, V]`."""
    logits_BLVr = model.logits(hidden_BLH)
    if sampling is None:
        return parallel_argmax(logits_BLVr, model.tp), None
    logits_BLV = gather_vocabulary(logits_BLVr, model.tp)
    return sampler.choose(logits_BLV, tokens_BL[:, 1:], sampling), logits_BLV
