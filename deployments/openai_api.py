"""The HTTP side of the Router: an OpenAI-compatible API in front of any engine.

`create_api(engine)` returns a FastAPI application. In Ray Serve it is bound late, when the
deployment exists: `@serve.ingress()` on a class whose `__serve_build_asgi_app__` returns
`create_api(self)`. Nothing here knows of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion

from deployments.answer import Answer, ChatAnswer, CompletionAnswer
from deployments.error_responses import EXCEPTION_HANDLERS, InternalErrors
from deployments.errors import (
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotReady,
)
from deployments.event_stream import ClientGone, EventStream, unless_client_leaves
from deployments.openai_protocol import ChatCompletionRequest, CompletionRequest, GenerationBody
from deployments.request_id import RequestId
from dflash_core.request import GenerationOutput, GenerationRequest

OWNER = "dflash"
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; access logs do
RESERVED_TEMPLATE_KWARGS = {"conversation", "tokenize", "chat_template", "return_dict", "messages"}


class Engine(Protocol):
    """What the API needs of the thing behind it.

    Attributes:
        tokenizer: a `transformers` fast tokenizer with a chat template.
        model_name: the id clients use.
        model_root: what the tokenizer can be loaded from: a hub id or a folder.
        max_model_len: most tokens of prompt and output together.
        vocab_size: rows of the target's embedding; prompt ids are below it.
    """

    tokenizer: Any
    model_name: str
    model_root: str
    max_model_len: int
    vocab_size: int

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        """Outputs as they are verified; the last one has a finish reason. Closing the generator
        frees everything the request holds. Raises an ApiError, e.g. QueueFull, before the first."""
        ...

    async def health(self) -> str | None:
        """None when requests can be served, else the reason why not."""
        ...

    async def stats(self) -> dict[str, Any]:
        """Figures for `GET /stats`, JSON."""
        ...


def create_api(engine: Engine, *, echo_request_id: bool = True) -> FastAPI:
    """The application.

    Args:
        engine: answers the requests.
        echo_request_id: return `X-Request-Id`. False behind Ray Serve's proxy, which returns the
            header itself: clients would see it twice.
    """
    app = FastAPI(title="DFlash", description="Speculative decoding behind the OpenAI API")
    started = int(time.time())

    @app.post("/v1/completions", response_model=Completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        check_model(engine, body.model)
        prompt = body.prompt
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            prompt = await encode(engine, prompt, "prompt", add_special_tokens=special)
        generation = generation_request(engine, prompt, body, "prompt", body.max_tokens)
        answer = CompletionAnswer(answer_id("cmpl", request), engine.model_name, prompt, body)
        return await respond(generation, answer, body, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        check_model(engine, body.model)
        text = await render(engine, body)
        special = body.add_special_tokens is True  # the template writes them, as a rule
        prompt = await encode(engine, text, "messages", add_special_tokens=special)
        max_tokens = body.max_completion_tokens or body.max_tokens
        generation = generation_request(engine, prompt, body, "messages", max_tokens)
        answer = ChatAnswer(answer_id("chatcmpl", request), engine.model_name, prompt, body)
        return await respond(generation, answer, body, request)

    async def respond(
        generation: GenerationRequest, answer: Answer, body: GenerationBody, request: Request
    ) -> Response:
        if body.stream:
            return EventStream(chunks(engine, generation, answer))
        try:
            await unless_client_leaves(request.receive, complete(engine, generation, answer))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(answer.whole(), media_type="application/json")

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> JSONResponse:
        check_model(engine, model)
        return JSONResponse(card())

    def card() -> dict[str, Any]:
        model = Model(
            id=engine.model_name,
            created=started,
            object="model",
            owned_by=OWNER,
            root=engine.model_root,
            parent=None,
            max_model_len=engine.max_model_len,
        )
        return model.model_dump()

    @app.get("/health")
    async def health() -> JSONResponse:
        reason = await engine.health()
        if reason is not None:
            raise NotReady(reason)
        return JSONResponse({"status": "ready"})

    @app.get("/stats")
    async def stats() -> JSONResponse:
        return JSONResponse(await engine.stats())

    app.exception_handlers.update(EXCEPTION_HANDLERS)
    app.add_middleware(InternalErrors)
    if echo_request_id:
        app.add_middleware(RequestId)
    return app


async def chunks(
    engine: Engine, request: GenerationRequest, answer: Answer
) -> AsyncGenerator[str, None]:
    """The events of a streamed answer."""
    async with contextlib.aclosing(collected(engine, request, answer)) as outputs:
        async for output in outputs:
            if (chunk := answer.chunk(output)) is not None:
                yield chunk
    if (chunk := answer.usage_chunk()) is not None:
        yield chunk


async def complete(engine: Engine, request: GenerationRequest, answer: Answer) -> None:
    """Fills an answer that is sent as a whole."""
    async with contextlib.aclosing(collected(engine, request, answer)) as outputs:
        async for _ in outputs:
            pass


async def collected(
    engine: Engine, request: GenerationRequest, answer: Answer
) -> AsyncGenerator[GenerationOutput, None]:
    """The engine's outputs, each of them added to the answer."""
    async with contextlib.aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            answer.add(output)
            yield output
    if not answer.finished:
        raise InternalError("The engine ended the output without a reason.")


def answer_id(kind: str, request: Request) -> str:
    """`X-Request-Id`, where there is one, with the prefix that OpenAI's ids have."""
    return f"{kind}-{request.headers.get('x-request-id') or uuid.uuid4().hex}"


def check_model(engine: Engine, model: str | None) -> None:
    if model is not None and model != engine.model_name:
        raise ModelNotFound(
            f"The model {model!r} does not exist; this server has {engine.model_name!r}.",
            param="model",
        )


async def encode(engine: Engine, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    # In a thread: tokenising a long prompt must not hold up everybody else's stream.
    def work() -> list[int]:
        return engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode: {error.reason}", param=param) from None
    return await asyncio.to_thread(work)


async def render(engine: Engine, body: ChatCompletionRequest) -> str:
    """The conversation in the model's chat template, ready for the assistant's turn."""
    messages = [message.for_template() for message in body.messages]
    kwargs = body.chat_template_kwargs or {}
    if reserved := sorted(RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs"
        )

    def work() -> str:
        options = {"add_generation_prompt": True} | kwargs
        return engine.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    try:
        return await asyncio.to_thread(work)
    except Exception as error:  # whatever a template raises is about the conversation it was given
        raise InvalidRequest(
            f"The chat template refuses these messages: {error}", param="messages"
        ) from error


def generation_request(
    engine: Engine, prompt: list[int], body: GenerationBody, param: str, max_tokens: int | None
) -> GenerationRequest:
    """Checks what depends on the model. Too long is an error even where only `max_tokens` makes it
    so, as in vLLM; without `max_tokens` the output may fill the context."""
    if not prompt:
        raise InvalidRequest(f"{param} is empty: send at least one token", param=param)
    if max(prompt) >= engine.vocab_size:
        raise InvalidRequest(
            f"{param} contains the token id {max(prompt)}, but the vocabulary has "
            f"{engine.vocab_size} tokens",
            param=param,
        )
    requested = max_tokens or 1
    if len(prompt) + requested > engine.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {engine.max_model_len} tokens. However, you "
            f"requested {requested} output tokens and your prompt contains {len(prompt)} input "
            f"tokens, for a total of {len(prompt) + requested} tokens. Please reduce the length of "
            "the input prompt or the number of requested output tokens.",
            param=param if len(prompt) >= engine.max_model_len else "max_tokens",
        )
    return GenerationRequest(
        request_id=uuid.uuid4().hex,  # clients may send the same X-Request-Id twice
        prompt_token_ids=prompt,
        max_tokens=max_tokens or engine.max_model_len - len(prompt),
        stop=body.stop_strings,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
    )
