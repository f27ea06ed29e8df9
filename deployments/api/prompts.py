"""What requests name: the model, and texts and conversations as the token ids that it sees."""

from __future__ import annotations

import asyncio
from typing import Any

from deployments.api.errors import InvalidRequest, ModelNotFound
from deployments.api.openai_protocol import Message

RESERVED_TEMPLATE_KWARGS = {"conversation", "tokenize", "chat_template", "return_dict", "messages"}


def check_model(served: str, model: str | None) -> None:
    """Raises ModelNotFound unless `model` is the one that is served, or not named at all."""
    if model is not None and model != served:
        raise ModelNotFound(
            f"The model {model!r} does not exist; this server has {served!r}.", param="model"
        )


async def encode(tokenizer: Any, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`. Raises InvalidRequest, naming the field `param`."""

    # In a thread: tokenising a long prompt must not hold up everybody else's stream.
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
