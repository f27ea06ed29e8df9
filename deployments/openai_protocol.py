"""Bodies of the OpenAI API: what requests may ask for, and the shapes of the answers.

Requests are validated strictly ("5" is not a number). As in vLLM, unknown fields are accepted and
ignored, and `stop_token_ids`, `ignore_eos`, `return_token_ids`, `add_special_tokens` and
`chat_template_kwargs` are understood. A known parameter that would change the answer in a way this
server does not support is refused by name; greedy decoding depends neither on `seed` nor on
`top_p`, `top_k` and `min_p`. Answers are the types of the `openai` package.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from openai.types import CompletionChoice
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.errors import InvalidRequest

TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1)]

# Parameters whose other values would change the answer, with the values that do not.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.0, None),
    "n": (1, None),
    "best_of": (1, None),
    "use_beam_search": (False, None),
    "presence_penalty": (0, 0.0, None),
    "frequency_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "logit_bias": ({}, None),
    "allowed_token_ids": (None,),
    "bad_words": ([], None),
    "min_tokens": (0, None),
    "echo": (False, None),
    "suffix": ("", None),
    "top_logprobs": (0, None),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None,),
    "include_stop_str_in_output": (False, None),
    "skip_special_tokens": (True, None),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "response_format": ({"type": "text"}, None),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "modalities": (["text"], None),
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None,),
    "continue_final_message": (False, None),
    "add_generation_prompt": (True, None),
}


class StreamOptions(BaseModel):
    """What a stream reports besides text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(BaseModel):
    """The fields that completions and chat completions share."""

    model_config = ConfigDict(strict=True, extra="allow")
    neutral_values: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL_VALUES

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    seed: int | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    user: str | None = None

    @model_validator(mode="after")
    def refuse_what_would_change_the_answer(self) -> GenerationBody:
        for name, value in (self.model_extra or {}).items():
            neutral = self.neutral_values.get(name)
            if neutral is not None and not any(same(value, allowed) for allowed in neutral):
                raise InvalidRequest(
                    f"{name}={shortened(value)} is not supported by this server, which decodes "
                    f"greedily: leave it out or send {json.dumps(neutral[0])}",
                    param=name,
                )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is allowed with stream=true only", param="stream_options"
            )
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(GenerationBody):
    """`POST /v1/completions`"""

    neutral_values = NEUTRAL_VALUES | {"logprobs": (None,)}

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int | None = Field(16, ge=1)
    add_special_tokens: bool | None = None

    @field_validator("prompt")
    @classmethod
    def take_the_only_prompt(cls, prompt: Any) -> str | list[int]:
        batch = isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int))
        if not batch:
            return prompt
        if len(prompt) != 1:
            raise ValueError(f"holds {len(prompt)} prompts: send one prompt per request")
        return prompt[0]


class TextPart(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str = Field(min_length=1)
    content: str | list[TextPart]

    @model_validator(mode="after")
    def refuse_tool_calls(self) -> Message:
        for name in ("tool_calls", "function_call", "tool_call_id"):
            if (self.model_extra or {}).get(name):
                raise InvalidRequest(
                    f"{name} in a message is not supported by this server", param="messages"
                )
        return self

    def for_template(self) -> dict[str, str]:
        """Role and text, the parts on lines of their own, as vLLM joins them."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": "\n".join(part.text for part in self.content)}


class ChatCompletionRequest(GenerationBody):
    """`POST /v1/chat/completions`"""

    neutral_values = NEUTRAL_VALUES | {"logprobs": (False, None)}

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class StreamedCompletionChoice(CompletionChoice):
    """A choice without a finish reason, before its last chunk: `openai` has no type for it."""

    finish_reason: Literal["stop", "length"] | None = None  # type: ignore[assignment]


def same(value: Any, allowed: Any) -> bool:
    """Equality that tells 0 from False, as JSON does."""
    return type(value) is type(allowed) and value == allowed


def shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
