"""Acceptance of draft tokens.

Shape legend: B sequences, L block length (newest token + drafts).
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept(tokens_BL: Tensor, lengths_B: Tensor, chosen_BL: Tensor) -> Tensor:
    """Number of leading drafts that equal what the target itself has chosen.

    Row b of `tokens_BL` is `[newest token, d1, d2, ...]` with `lengths_B[b]` valid entries; draft
    d_i is accepted while it equals the token chosen at the row before it, by argmax or by a draw.
    The tokens to emit are then `chosen_BL[b, : accepted + 1]`: the accepted drafts and the bonus
    token.

    Returns:
        int32 `[B]`, between 0 and lengths - 1.
    """
    drafts_BK = tokens_BL[:, 1:]
    offsets_K = torch.arange(1, tokens_BL.shape[1], device=tokens_BL.device)
    matches_BK = (drafts_BK == chosen_BL[:, :-1]) & (offsets_K < lengths_B[:, None])
    return matches_BK.int().cumprod(dim=1).sum(dim=1).int()
