"""Choose tokens from the target's logits, every row by its own request's parameters.

A draft is a single token, so sampling and verifying meet in one draw per row: the target's own
token x is drawn from the row's processed distribution p, and the draft d of that position is
accepted iff d == x. That accepts d with probability p(d), and what is emitted otherwise has the
distribution of p without d, renormalised: the rejection sampler of speculative decoding (Leviathan
et al., 2023) for a draft distribution that is all on d. Acceptance is thus the same comparison as
in greedy decoding (`dflash_core.verify`), and the emitted tokens do not depend on the drafts.

Shape legend: B sequences, L rows per sequence, K = L - 1 drafts, R rows, V vocabulary,
N candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.messages import SamplingPlan
from dflash_core.request import TokenLogprobs

# Top-k and top-p look at that many most likely tokens first; where some row needs more of them, at
# the next number, and at last at the whole vocabulary.
CANDIDATES = (256, 4096)


@dataclass(frozen=True)
class Penalties:
    """What is subtracted for tokens seen before, and which were."""

    repetition_B: Tensor  # float32, as the next two
    presence_B: Tensor
    frequency_B: Tensor
    counts_BV: Tensor  # int32: how often the output so far holds the token
    prompt_BV: Tensor  # bool: whether the prompt does


@dataclass(frozen=True)
class SamplerInputs:
    """A SamplingPlan as dense tensors of fixed shape; None for what no sequence uses."""

    temperature_B: Tensor | None
    uniforms_BL: Tensor
    min_p_B: Tensor | None
    top_k_B: Tensor | None  # int64; the vocabulary size for all tokens
    top_p_B: Tensor | None
    bias_BV: Tensor | None
    banned_BLV: Tensor | None  # bool
    penalties: Penalties | None


def sampler_inputs(
    plan: SamplingPlan, batch: int, vocab_size: int, device: torch.device
) -> SamplerInputs:
    """Build the tensors on the host, pad the sequences to `batch` and move them to the device.

    The padding is greedy. Token ids beyond the vocabulary can only be banned ones (a stop id may
    be anything): no token of the model, so nothing to ban.
    """
    sequences, L = plan.uniforms.shape

    def padded(values: np.ndarray, fill: float) -> Tensor:
        rows = np.full((batch, *values.shape[1:]), fill, dtype=values.dtype)
        rows[:sequences] = values
        return torch.from_numpy(rows).to(device)

    penalties = bias_BV = banned_BLV = None
    if (plan.repetition != 1).any() or plan.presence.any() or plan.frequency.any():
        counts = np.zeros((batch, vocab_size), dtype=np.int32)
        prompt = np.zeros((batch, vocab_size), dtype=np.bool_)
        rows, tokens, output = plan.history_rows, plan.history_tokens, plan.history_output
        np.add.at(counts, (rows[output], tokens[output]), 1)
        prompt[rows[~output], tokens[~output]] = True
        penalties = Penalties(
            padded(plan.repetition, 1),
            padded(plan.presence, 0),
            padded(plan.frequency, 0),
            torch.from_numpy(counts).to(device),
            torch.from_numpy(prompt).to(device),
        )
    if len(plan.bias_rows):
        bias = np.zeros((batch, vocab_size), dtype=np.float32)
        bias[plan.bias_rows, plan.bias_tokens] = plan.bias_values
        bias_BV = torch.from_numpy(bias).to(device)
    if len(plan.banned_rows):
        banned = np.zeros((batch, vocab_size), dtype=np.bool_)
        known = plan.banned_tokens < vocab_size
        banned[plan.banned_rows[known], plan.banned_tokens[known]] = True
        early_BL = torch.arange(L) < padded(plan.banned_lengths, 0).cpu()[:, None]
        banned_BLV = (torch.from_numpy(banned)[:, None] & early_BL[..., None]).to(device)
    random = plan.temperature > 0
    top_k = np.where((plan.top_k == 0) | ~random, vocab_size, plan.top_k).clip(max=vocab_size)
    top_p = np.where(random, plan.top_p, np.float32(1))
    filtered = bool((top_k < vocab_size).any() or (top_p < 1).any())
    return SamplerInputs(
        temperature_B=padded(plan.temperature, 0) if random.any() else None,
        uniforms_BL=padded(plan.uniforms, 0),
        min_p_B=padded(plan.min_p, 0) if (plan.min_p[random] > 0).any() else None,
        top_k_B=padded(top_k.astype(np.int64), vocab_size) if filtered else None,
        top_p_B=padded(top_p, 1) if filtered else None,
        bias_BV=bias_BV,
        banned_BLV=banned_BLV,
        penalties=penalties,
    )


def choose(logits_BLV: Tensor, drafts_BK: Tensor, inputs: SamplerInputs) -> Tensor:
    """The target's own token at every row.

    Args:
        logits_BLV: raw logits over the whole vocabulary; not changed.
        drafts_BK: int32, the block's tokens after its first; row i is processed as if the drafts
            before it had been accepted.

    Returns:
        int32 `[B, L]`.
    """
    x_BLV = penalise(logits_BLV.float(), drafts_BK, inputs)
    greedy_BL = x_BLV.argmax(dim=-1)
    if inputs.temperature_B is None:
        return greedy_BL.to(torch.int32)
    random_B11 = (inputs.temperature_B > 0)[:, None, None]
    x_BLV = x_BLV / torch.where(random_B11, inputs.temperature_B[:, None, None], 1.0)
    sampled_BL = draw(narrow(x_BLV, inputs), inputs.uniforms_BL)
    return torch.where(random_B11[..., 0], sampled_BL, greedy_BL).to(torch.int32)


def penalise(x_BLV: Tensor, drafts_BK: Tensor, inputs: SamplerInputs) -> Tensor:
    """Everything that greedy decoding heeds too: min_tokens, logit_bias, penalties."""
    if inputs.banned_BLV is not None:
        x_BLV = x_BLV.masked_fill(inputs.banned_BLV, -torch.inf)
    if inputs.bias_BV is not None:
        x_BLV = x_BLV + inputs.bias_BV[:, None]
    if inputs.penalties is None:
        return x_BLV
    each = inputs.penalties
    # Row i counts the drafts 1..i besides the output so far.
    counts_BLV = each.counts_BV[:, None].repeat(1, x_BLV.shape[1], 1)
    for row in range(1, x_BLV.shape[1]):
        draft_B1 = drafts_BK[:, row - 1 : row].long()
        counts_BLV[:, row] = counts_BLV[:, row - 1].scatter_add(
            1, draft_B1, torch.ones_like(draft_B1, dtype=counts_BLV.dtype)
        )
    present_BLV = counts_BLV > 0
    seen_BLV = present_BLV | each.prompt_BV[:, None]
    factor_BLV = torch.where(seen_BLV, each.repetition_B[:, None, None], 1.0)
    x_BLV = torch.where(x_BLV > 0, x_BLV / factor_BLV, x_BLV * factor_BLV)
    x_BLV = x_BLV - each.frequency_B[:, None, None] * counts_BLV
    return x_BLV - each.presence_B[:, None, None] * present_BLV


def narrow(x_BLV: Tensor, inputs: SamplerInputs) -> Tensor:
    """-inf for what min_p, then top_k, then top_p leave out; equal logits stay or go together."""
    if inputs.min_p_B is not None:
        floor_BL1 = x_BLV.amax(dim=-1, keepdim=True) + inputs.min_p_B.log()[:, None, None]
        x_BLV = x_BLV.masked_fill(x_BLV < floor_BL1, -torch.inf)
    if inputs.top_k_B is None or inputs.top_p_B is None:
        return x_BLV
    B, L, V = x_BLV.shape
    x_RV = x_BLV.flatten(0, 1)
    k_R, p_R = inputs.top_k_B.repeat_interleave(L), inputs.top_p_B.repeat_interleave(L)
    least_R = x_RV.new_full((B * L,), -torch.inf)
    rows = ((k_R < V) | (p_R < 1)).nonzero()[:, 0]
    for candidates in (*(size for size in CANDIDATES if size < V), V):
        least_R[rows], enough_R = least_kept(x_RV[rows], k_R[rows], p_R[rows], candidates)
        rows = rows[~enough_R]
        if len(rows) == 0:
            break
    return x_BLV.masked_fill(x_BLV < least_R.view(B, L, 1), -torch.inf)


def least_kept(x_RV: Tensor, k_R: Tensor, p_R: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """The smallest logit within the top k, and of these within the top p, of each row.

    Returns:
        The logits `[R]`, and whether the N most likely tokens were enough to find them.
    """
    V = x_RV.shape[-1]
    top_RN = x_RV.topk(candidates, dim=-1).values
    last_R1 = top_RN.gather(-1, k_R.clamp(max=candidates)[:, None] - 1)
    floor_R1 = torch.where(k_R[:, None] < V, last_R1, -torch.inf)
    total_R1 = x_RV.masked_fill(x_RV < floor_R1, -torch.inf).logsumexp(dim=-1, keepdim=True)
    mass_RN = (top_RN.masked_fill(top_RN < floor_R1, -torch.inf) - total_R1).exp().cumsum(dim=-1)
    # The candidates up to the one that completes the mass p.
    needed_R1 = (mass_RN < p_R[:, None]).sum(dim=-1, keepdim=True).clamp(max=candidates - 1)
    least_R1 = torch.where(p_R[:, None] < 1, top_RN.gather(-1, needed_R1), floor_R1)
    enough_k_R = (k_R <= candidates) | (k_R == V)
    enough_p_R = (p_R == 1) | (mass_RN[:, -1] >= p_R) | (candidates == V)
    return torch.maximum(least_R1, floor_R1)[:, 0], enough_k_R & enough_p_R


def draw(x_BLV: Tensor, uniforms_BL: Tensor) -> Tensor:
    """The first token, in id order, at which the cumulated probability exceeds the uniform number.

    The number is scaled to what the float32 sum really is, and kept below it. Where rounding (a
    parallel sum need not even ascend) leads to a token of probability 0 all the same, the most
    likely token is taken.
    """
    p_BLV = x_BLV.softmax(dim=-1)
    sums_BLV = p_BLV.cumsum(dim=-1)
    total_BL1 = sums_BLV[..., -1:]
    below_BL1 = torch.nextafter(total_BL1, torch.zeros_like(total_BL1))
    target_BL1 = torch.minimum(uniforms_BL[..., None] * total_BL1, below_BL1)
    token_BL1 = torch.searchsorted(sums_BLV, target_BL1, right=True).clamp(max=p_BLV.shape[-1] - 1)
    possible_BL1 = p_BLV.gather(-1, token_BL1) > 0
    return torch.where(possible_BL1, token_BL1, p_BLV.argmax(dim=-1, keepdim=True))[..., 0]


def logprobs(
    logits_BLV: Tensor, tokens: list[list[int]], num_logprobs: np.ndarray
) -> list[list[TokenLogprobs] | None]:
    """Log probabilities of the emitted tokens and of the most likely ones, of the raw logits.

    Args:
        logits_BLV: as the model computed them.
        tokens: emitted tokens per sequence, the one of row i at index i.
        num_logprobs: int32 `[B]`, alternatives to report; -1: the sequence did not ask.
    """
    answers: list[list[TokenLogprobs] | None] = []
    for b, (emitted, count) in enumerate(zip(tokens, num_logprobs.tolist(), strict=True)):
        if count < 0:
            answers.append(None)
            continue
        logprob_LV = F.log_softmax(logits_BLV[b, : len(emitted)].float(), dim=-1)
        ids_L1 = torch.tensor(emitted, device=logprob_LV.device)[:, None]
        own = logprob_LV.gather(1, ids_L1)[:, 0].tolist()
        top = logprob_LV.topk(min(count, logprob_LV.shape[1]), dim=-1)
        answers.append(
            [
                TokenLogprobs(value, tuple(zip(ids, values, strict=True)))
                for value, ids, values in zip(
                    own, top.indices.tolist(), top.values.tolist(), strict=True
                )
            ]
        )
    return answers
