"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.api.errors import InvalidRequest
from deployments.api.openai_protocol import Message, TokenId
from deployments.api.prompts import check_model, encode_any, render

if TYPE_CHECKING:
    from deployments.api.openai_api import Engine


class TokenizeRequest(BaseModel):
    """`POST /tokenize`: a prompt or a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def take_one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        for name in ("chat_template", "continue_final_message", "tools"):
            if (self.model_extra or {}).get(name):
                raise InvalidRequest(f"{name} is not supported by this server", param=name)
        return self


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`"""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(BaseModel):
    prompt: str


def tokenization_routes(engine: Engine) -> APIRouter:
    """The two routes, in front of the engine's tokenizer."""
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        check_model(engine.model_name, body.model)
        if body.messages is None:
            text, param = body.prompt or "", "prompt"
            special = body.add_special_tokens is not False
        else:
            kwargs = dict(body.chat_template_kwargs or {})
            if body.add_generation_prompt is not None:
                kwargs["add_generation_prompt"] = body.add_generation_prompt
            text, param = await render(engine.tokenizer, body.messages, kwargs), "messages"
            special = body.add_special_tokens is True  # the template writes them, as a rule
        tokens = await encode_any(engine.tokenizer, text, param, add_special_tokens=special)
        strings = engine.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=engine.max_model_len,
            tokens=tokens,
            token_strs=strings,
        )

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        check_model(engine.model_name, body.model)
        if max(body.tokens, default=0) >= engine.vocab_size:
            raise InvalidRequest(
                f"tokens contains {max(body.tokens)}, but the vocabulary has "
                f"{engine.vocab_size} tokens",
                param="tokens",
            )
        text = await asyncio.to_thread(engine.tokenizer.decode, body.tokens)
        return DetokenizeResponse(prompt=text)

    return routes
