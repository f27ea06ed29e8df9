"""What requests name: the model, and texts and conversations as the token ids that it sees."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from deployments.api.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from deployments.api.openai_protocol import Message

RESERVED_TEMPLATE_KWARGS = {"conversation", "tokenize", "chat_template", "return_dict", "messages"}


def check_model(served: str, model: str | None) -> None:
    """Raises ModelNotFound unless `model` is the one that is served, or not named at all."""
    if model is not None and model != served:
        raise ModelNotFound(
            f"The model {model!r} does not exist; this server has {served!r}.", param="model"
        )


class TextLimits(Protocol):
    """What texts are turned into token ids with.

    Attributes:
        tokenizer: a `transformers` fast tokenizer.
        max_model_len: most tokens of prompt and output together.
        max_token_chars: of the longest token.
    """

    tokenizer: Any
    max_model_len: int
    max_token_chars: int


async def encode(
    limits: TextLimits, text: str, param: str, *, add_special_tokens: bool
) -> list[int]:
    """Token ids of a prompt. A text that has too many of them in any case, which takes long to
    find out, is refused unseen.

    Raises:
        ContextLengthExceeded, InvalidRequest: naming the field `param`.
    """
    most = limits.max_model_len * limits.max_token_chars
    if len(text) > most:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your "
            f"prompt has {len(text)} characters, which is more than {most}, the most that so many "
            "tokens can have. Please reduce the length of the input prompt.",
            param=param,
        )
    return await encode_any(limits.tokenizer, text, param, add_special_tokens=add_special_tokens)


async def encode_any(
    tokenizer: Any, text: str, param: str, *, add_special_tokens: bool
) -> list[int]:
    """Token ids of a text of any length. Raises InvalidRequest, naming the field `param`."""

    # In a thread: tokenising a long text must not hold up everybody else's stream.
    def work() -> list[int]:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode: {error.reason}", param=param) from None
    return await asyncio.to_thread(work)


async def render(
    tokenizer: Any, messages: list[Message], template_kwargs: dict[str, Any] | None
) -> str:
    """The conversation in the model's chat template, ready for the assistant's turn.

    Raises InvalidRequest.
    """
    conversation = [message.for_template() for message in messages]
    kwargs = template_kwargs or {}
    if reserved := sorted(RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs"
        )

    def work() -> str:
        options = {"add_generation_prompt": True} | kwargs
        return tokenizer.apply_chat_template(conversation, tokenize=False, **options)

    try:
        return await asyncio.to_thread(work)
    except Exception as error:  # whatever a template raises is about the conversation it was given
        raise InvalidRequest(
            f"The chat template refuses these messages: {error}", param="messages"
        ) from error
