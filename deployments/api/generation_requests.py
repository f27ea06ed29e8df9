"""From the body of an API request to what the engine is asked: one request per choice."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import replace
from typing import Any, Protocol

from deployments.api.errors import ContextLengthExceeded, InvalidRequest
from deployments.api.openai_protocol import GenerationBody
from dflash_core.request import GenerationRequest
from dflash_core.sampling import MAX_ABS_BIAS, InvalidSampling, SamplingParams, choice_seed

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "seed",
)


class ModelLimits(Protocol):
    """What requests must respect.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        vocab_size: token ids are below it.
        sampling_defaults: of the checkpoint, for parameters that a request leaves out.
        all_greedy: nothing but the argmax of the logits is served.
    """

    max_model_len: int
    vocab_size: int
    sampling_defaults: dict[str, float]
    all_greedy: bool


def generation_requests(
    limits: ModelLimits,
    prompts: list[list[int]],
    body: GenerationBody,
    param: str,
    max_tokens: int | None,
) -> list[GenerationRequest]:
    """`n` requests for each prompt, in the order of the answer's choices.

    Choice 0 of a prompt has the request's seed, the others have seeds derived from it; without a
    seed every prompt gets a random one. Too long is an error even where only `max_tokens` makes it
    so, as in vLLM; without `max_tokens` the output may fill the context.

    Raises:
        InvalidRequest: naming the field.
    """
    try:
        sampling = sampling_params(limits, body)
        requests = []
        for prompt in prompts:
            check_prompt(limits, prompt, param, max_tokens)
            seed = secrets.randbits(63) if body.seed is None else body.seed
            for choice in range(body.n or 1):
                request = GenerationRequest(
                    request_id=uuid.uuid4().hex,  # clients may send the same X-Request-Id twice
                    prompt_token_ids=prompt,
                    max_tokens=max_tokens or limits.max_model_len - len(prompt),
                    stop=body.stop_strings,
                    stop_token_ids=tuple(body.stop_token_ids or ()),
                    ignore_eos=bool(body.ignore_eos),
                    sampling=replace(sampling, seed=choice_seed(seed, choice)),
                )
                requests.append(request)
    except InvalidSampling as error:
        raise InvalidRequest(str(error), param=error.field) from error
    return requests


def sampling_params(limits: ModelLimits, body: GenerationBody) -> SamplingParams:
    """The body's parameters, else the checkpoint's, else those of the OpenAI API."""
    defaults: dict[str, Any] = {"temperature": 1.0} | limits.sampling_defaults
    if limits.all_greedy:
        defaults = {"temperature": 0.0}
    asked = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    bias = {
        int(token): min(MAX_ABS_BIAS, max(-MAX_ABS_BIAS, value))
        for token, value in (body.logit_bias or {}).items()
    }
    if bias and max(bias) >= limits.vocab_size:
        raise InvalidRequest(
            f"logit_bias contains the token id {max(bias)}, but the vocabulary has "
            f"{limits.vocab_size} tokens",
            param="logit_bias",
        )
    params = SamplingParams(**defaults | asked, logit_bias=bias, logprobs=body.num_logprobs)
    if limits.all_greedy and params.beyond_argmax:
        name = params.beyond_argmax[0]
        raise InvalidRequest(
            f"{name} = {getattr(body, name)} is not supported: this server decodes greedily "
            "(all_greedy). Leave it out, and temperature too or send 0.",
            param=name,
        )
    return params


def check_prompt(
    limits: ModelLimits, prompt: list[int], param: str, max_tokens: int | None
) -> None:
    if not prompt:
        raise InvalidRequest(f"{param} is empty: send at least one token", param=param)
    if max(prompt) >= limits.vocab_size:
        raise InvalidRequest(
            f"{param} contains the token id {max(prompt)}, but the vocabulary has "
            f"{limits.vocab_size} tokens",
            param=param,
        )
    requested = max_tokens or 1
    if len(prompt) + requested > limits.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you "
            f"requested {requested} output tokens and your prompt contains {len(prompt)} input "
            f"tokens, for a total of {len(prompt) + requested} tokens. Please reduce the length of "
            "the input prompt or the number of requested output tokens.",
            param=param if len(prompt) >= limits.max_model_len else "max_tokens",
        )
