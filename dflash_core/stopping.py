"""When an output ends, and what of it is kept: decided once, on accepted tokens.

A speculative step accepts several tokens at once, so every rule is applied token by token: the
first one that ends the output wins, and what the same step accepted after it is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_core.detokenizer import Detokenizer
from dflash_core.request import FinishReason, GenerationOutput, GenerationRequest


class Stopping:
    """Turns the accepted tokens of one request into its output.

    After each token, in this order: EOS or stop id, stop string, `max_tokens`, context length
    (prompt + output <= `max_model_len`). As in vLLM, the id of a stop token is kept and counted but
    adds no text; a stop string is cut from the text, while the ids up to the one that completed it
    are kept. Of several stop strings the one that is complete first wins. Before `min_tokens` no
    stop string counts, not even one that a later token leaves behind it; ids that would end the
    output are kept out by the sampler until then.

    Args:
        tokenizer: as for `Detokenizer`.
        request: the limits and stops.
        eos_token_ids: ids after which the model has nothing to say.
        max_model_len: tokens that fit into the KV cache.
    """

    def __init__(
        self,
        tokenizer: Any,
        request: GenerationRequest,
        *,
        eos_token_ids: Sequence[int],
        max_model_len: int,
    ) -> None:
        room = max_model_len - len(request.prompt_token_ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(request.prompt_token_ids)} tokens and max_model_len is "
                f"{max_model_len}: there is no room for output"
            )
        self.request = request
        self._detokenizer = Detokenizer(tokenizer)
        self._eos_token_ids = frozenset(() if request.ignore_eos else eos_token_ids)
        self._stop_token_ids = frozenset(request.stop_token_ids)
        self._stop = request.stop
        self._max_tokens = min(request.max_tokens, room)
        self._held_back = ""  # text that may be the beginning of a stop string
        self._num_tokens = 0
        self._finish_reason: FinishReason | None = None

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Ids after which nothing follows."""
        return self._eos_token_ids | self._stop_token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens kept so far."""
        return self._num_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still follow: a step need not draft more than this, less one."""
        return 0 if self._finish_reason else self._max_tokens - self._num_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while the output may go on."""
        return self._finish_reason

    def append(self, token_ids: Sequence[int]) -> GenerationOutput:
        """Adds the tokens of one step and returns what is kept of them.

        Raises:
            RuntimeError: the output has already ended.
        """
        if self._finish_reason is not None:
            raise RuntimeError(f"append after the output has ended ({self._finish_reason})")
        if not self._stop:
            return self._append_without_strings(token_ids)
        text = ""
        for position, token_id in enumerate(token_ids):
            output = self._append_without_strings([token_id])
            delta, found = self._cut(output)
            text += delta
            if found is not None:
                self._finish_reason = "stop"
                return GenerationOutput(list(token_ids[: position + 1]), text, "stop", found)
            if output.finish_reason is not None:
                return GenerationOutput(
                    list(token_ids[: position + 1]), text, output.finish_reason, output.stop_reason
                )
        return GenerationOutput(list(token_ids), text)

    def _append_without_strings(self, token_ids: Sequence[int]) -> GenerationOutput:
        kept = list(token_ids[: self._max_tokens - self._num_tokens])
        visible = kept
        stop_reason: int | None = None
        for position, token_id in enumerate(kept):
            if token_id in self._eos_token_ids or token_id in self._stop_token_ids:
                self._finish_reason = "stop"
                stop_reason = None if token_id in self._eos_token_ids else token_id
                visible, kept = kept[:position], kept[: position + 1]
                break
        self._num_tokens += len(kept)
        if self._finish_reason is None and self._num_tokens == self._max_tokens:
            self._finish_reason = "length"
        text = self._detokenizer.append(visible)
        if self._finish_reason is not None:
            text += self._detokenizer.flush()
        return GenerationOutput(kept, text, self._finish_reason, stop_reason)

    def _cut(self, output: GenerationOutput) -> tuple[str, str | None]:
        """Text that may go out, and the stop string that ended it, if one did."""
        text = self._held_back + output.text
        found = []
        if self._num_tokens > self.request.sampling.min_tokens:
            # A match ends in new text: what is held back may contain one that came too early.
            for stop in self._stop:
                start = text.find(stop, max(0, len(self._held_back) - len(stop) + 1))
                if start >= 0:
                    found.append((start, stop))
        if found:
            start, stop = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            return text[:start], stop
        held = 0 if output.finish_reason else self._undecided(text)
        self._held_back = text[len(text) - held :]
        return text[: len(text) - held], None

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
