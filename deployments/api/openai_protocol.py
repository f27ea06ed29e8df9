"""Bodies of the OpenAI API: what requests may ask for, and the shapes of the answers.

Requests are validated strictly ("5" is not a number). As in vLLM, unknown fields are accepted and
ignored, and `stop_token_ids`, `ignore_eos`, `return_token_ids`, `add_special_tokens` and
`chat_template_kwargs` are understood, and so are vLLM's sampling parameters, whose ranges
`dflash_core.sampling` checks. A known parameter that would change the answer in a way this server
does not support is refused by name. Answers are the types of the `openai` package.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from openai.types import CompletionChoice
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.api.errors import InvalidRequest
from dflash_core.sampling import MAX_LOGPROBS

TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
FiniteNumber = Annotated[float, Field(allow_inf_nan=False)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]

MAX_CHOICES = 128  # of one request: prompts times n
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRINGS = 64  # each of them is looked for in every piece of the output

# Parameters whose other values would change the answer, with the values that do not.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1, None),
    "use_beam_search": (False, None),
    "allowed_token_ids": (None,),
    "bad_words": ([], None),
    "echo": (False, None),
    "suffix": ("", None),
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
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, FiniteNumber] | None = None
    min_tokens: int | None = None
    user: str | None = None

    @field_validator("logit_bias")
    @classmethod
    def name_token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for name in bias or {}:
            if not (name.isascii() and name.isdecimal() and len(name) < 10):
                raise ValueError(f"{shortened(name)} is not a token id")
        return bias

    @model_validator(mode="after")
    def refuse_what_would_change_the_answer(self) -> GenerationBody:
        for name, value in (self.model_extra or {}).items():
            neutral = self.neutral_values.get(name)
            if neutral is not None and not any(same(value, allowed) for allowed in neutral):
                raise InvalidRequest(
                    f"{name}={shortened(value)} is not supported by this server: leave it "
                    f"out or send {json.dumps(neutral[0])}",
                    param=name,
                )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is allowed with stream=true only", param="stream_options"
            )
        return self

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives to report with every token; None for no log probabilities at all."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(GenerationBody):
    """`POST /v1/completions`"""

    neutral_values = NEUTRAL_VALUES | {"top_logprobs": (0, None)}

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int | None = Field(16, ge=1)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def echo_no_logprobs(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise InvalidRequest(
                "echo with logprobs is not supported by this server: it has no log probabilities "
                "of prompts. Leave one of them out.",
                param="echo",
            )
        return self

    @model_validator(mode="after")
    def limit_the_choices(self) -> CompletionRequest:
        choices = len(self.prompts) * (self.n or 1)
        if choices > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt and n ask for {choices} choices: at most {MAX_CHOICES} are given",
                param="prompt",
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """A batch, even of one; an empty list is one empty prompt."""
        batch = (
            isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        )
        return self.prompt if batch else [self.prompt]  # type: ignore[return-value, list-item]

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


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

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def ask_for_logprobs_explicitly(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs is allowed with logprobs=true only", param="top_logprobs"
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class StreamedCompletionChoice(CompletionChoice):
    """A choice without a finish reason, before its last chunk: `openai` has no type for it."""

    finish_reason: Literal["stop", "length"] | None = None  # type: ignore[assignment]


def same(value: Any, allowed: Any) -> bool:
    """Equality that tells 0 from False, as JSON does."""
    return type(value) is type(allowed) and value == allowed


def shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
