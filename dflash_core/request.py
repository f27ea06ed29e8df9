"""One generation request and the pieces of its answer: what HTTP and the engines exchange."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from dflash_core.sampling import GREEDY, InvalidSampling, SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue until something stops it.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_token_ids: at least one id; the caller has checked them against the vocabulary.
        max_tokens: most tokens to generate, at least 1.
        stop: strings that end the text, not part of it.
        stop_token_ids: ids that end the output, besides the model's own EOS ids.
        ignore_eos: go on after an EOS id (but not after one named in `stop_token_ids`).
        sampling: how each token is chosen; greedily unless it says otherwise.

    Raises:
        ValueError: a field that no engine could serve, by name and value.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling: SamplingParams = GREEDY

    def __post_init__(self) -> None:
        if not self.request_id:
            raise ValueError("request_id is empty: give every request its own")
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids is empty: a prompt needs at least one token")
        if (lowest := min(self.prompt_token_ids)) < 0:
            raise ValueError(f"prompt_token_ids contains {lowest}: ids are >= 0")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: ask for at least 1")
        if isinstance(self.stop, str):
            raise ValueError(f"stop is the string {self.stop!r}: pass a tuple of strings")
        if "" in self.stop:
            raise ValueError("stop contains an empty string: it would end every output at once")
        if self.sampling.min_tokens > self.max_tokens:
            raise InvalidSampling(
                "min_tokens",
                f"is {self.sampling.min_tokens}: it must be at most max_tokens = {self.max_tokens}",
            )


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at the position of one token, of the target's raw logits.

    Attributes:
        logprob: of the token itself.
        top: the most likely tokens, (id, log probability), the most likely first; as many as asked.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class GenerationOutput:
    """What one step adds to the answer.

    Attributes:
        token_ids: new ids that are kept; a stop token is among them, nothing after it is.
        text: new text. It may lag behind the ids: unfinished characters and possible beginnings
            of a stop string are held back until they are decided.
        finish_reason: None until the last output; "stop" for EOS, stop id or stop string.
        stop_reason: the stop string or stop id that ended it; None for EOS and for "length".
        statistics: of the whole request, on the last output, where the engine keeps any.
        logprobs: one entry per id of `token_ids`; None where the request did not ask.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    statistics: dict[str, Any] | None = None
    logprobs: list[TokenLogprobs] | None = None

    def __add__(self, later: GenerationOutput) -> GenerationOutput:
        """Both as one output; `later` is what came next in the same answer."""
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            logprobs=None if later.logprobs is None else (self.logprobs or []) + later.logprobs,
        )
