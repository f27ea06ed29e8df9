"""Notices speculation that does not pay, and says so once."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from statistics import mean

from dflash_core.statistics import AcceptanceStatistics

logger = logging.getLogger("ray.serve")

WINDOW_DRAFTS = 200
NEAR_ZERO = 0.1  # drafts accepted per step

REJECTED = (
    "Speculation accepts almost nothing: %.3f of %.1f drafts per step, over %d steps. Answers are "
    "right, but each token now costs a draft as well. Likely causes, in this order: the drafter "
    "is random, or was trained for another target (or another revision or quantisation of it); "
    "target_layer_ids are off by one (z-lab ids count layer outputs, speculators ids count "
    "hidden_states); mask_token_id names a token whose embedding was never trained; prompts do "
    "not follow the chat template, or the thinking mode, that the drafter was trained with; "
    "contexts are longer than the drafter was trained for, or than its attention windows. Compare "
    "the drafter's card with its config.json, or set `speculation: null`."
)
SLOW = (
    "Speculation is slower than decoding without it: a step brings %.2f tokens, but with %d "
    "requests at once it costs as much as %.2f plain steps (idle replicas, short context). Likely "
    "causes: num_speculative_tokens is too large for this acceptance; so many requests run that "
    "verifying is bound by compute (lower max_num_seqs, or add Verifiers); the drafter shares "
    "cores with the target or has too few of them. Lower num_speculative_tokens or set "
    "`speculation: null`."
)


class SpeculationCheck:
    """Judges windows of at least WINDOW_DRAFTS verify steps; warns once of each fault.

    Args:
        break_even: the acceptance length from which speculation pays with that many requests at
            once on a Verifier; None = not known.
    """

    def __init__(self, break_even: Callable[[int], float | None]) -> None:
        self._break_even = break_even
        self._window_start = AcceptanceStatistics()
        self._running: list[float] = []
        self._warned: set[str] = set()

    def observe(self, acceptance: AcceptanceStatistics, running: float) -> None:
        """Look at the sums so far; call it regularly.

        Args:
            acceptance: only grows.
            running: requests that decode at once on a Verifier, on average.
        """
        if running:
            self._running.append(running)
        start = self._window_start
        drafts = acceptance.num_drafts - start.num_drafts
        if drafts < WINDOW_DRAFTS:
            return
        accepted = (acceptance.num_accepted_tokens - start.num_accepted_tokens) / drafts
        proposed = (acceptance.num_draft_tokens - start.num_draft_tokens) / drafts
        at_once = round(mean(self._running)) if self._running else 0
        break_even = self._break_even(at_once)
        self._window_start = copy.copy(acceptance)
        self._running = []
        if accepted < NEAR_ZERO:
            self._warn("rejected", REJECTED, accepted, proposed, drafts)
        elif break_even is not None and 1 + accepted < break_even:
            self._warn("slow", SLOW, 1 + accepted, at_once, break_even)

    def _warn(self, fault: str, message: str, *values: float) -> None:
        if fault not in self._warned:
            self._warned.add(fault)
            logger.warning(message, *values)
