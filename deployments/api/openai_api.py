"""The HTTP side of the Router: an OpenAI-compatible API in front of any engine.

`create_api(engine)` returns a FastAPI application. In Ray Serve it is bound late, when the
deployment exists: `@serve.ingress()` on a class whose `__serve_build_asgi_app__` returns
`create_api(self)`. Nothing here knows of Ray.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.middleware.cors import CORSMiddleware

from deployments import __version__
from deployments.api.answer import Answer, ChatAnswer, CompletionAnswer
from deployments.api.api_key import RequireApiKey
from deployments.api.body_limit import MAX_BODY_BYTES, BodyLimit
from deployments.api.error_responses import EXCEPTION_HANDLERS, InternalErrors
from deployments.api.errors import InternalError, NotReady
from deployments.api.event_stream import ClientGone, EventStream, unless_client_leaves
from deployments.api.generation_requests import generation_requests
from deployments.api.header_limit import HeaderLimit
from deployments.api.interleaved import interleaved
from deployments.api.openai_protocol import ChatCompletionRequest, CompletionRequest, GenerationBody
from deployments.api.prompts import check_model, encode, render
from deployments.api.request_id import RequestId
from deployments.api.tokenization_api import tokenization_routes
from deployments.health import Health
from dflash_core.request import GenerationOutput, GenerationRequest

OWNER = "dflash"
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; access logs do


class Engine(Protocol):
    """What the API needs of the thing behind it.

    Attributes:
        tokenizer: a `transformers` fast tokenizer with a chat template.
        model_name: the id clients use.
        model_root: what the tokenizer can be loaded from: a hub id or a folder.
        max_model_len: most tokens of prompt and output together.
        max_token_chars: of the longest token: a longer text has more than one.
        vocab_size: rows of the target's embedding; token ids are below it.
        sampling_defaults: sampling parameters that hold where a request leaves them out.
        all_greedy: the engine serves nothing but the argmax of the logits.
    """

    tokenizer: Any
    model_name: str
    model_root: str
    max_model_len: int
    max_token_chars: int
    vocab_size: int
    sampling_defaults: dict[str, float]
    all_greedy: bool

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        """Outputs as they are verified; the last one has a finish reason. Closing the generator
        frees everything the request holds. Raises an ApiError, e.g. QueueFull, before the first."""
        ...

    async def health(self) -> Health:
        """Whether requests can be served, and how well."""
        ...

    async def stats(self) -> dict[str, Any]:
        """Figures for `GET /stats`, JSON."""
        ...

    async def trace(self) -> dict[str, Any]:
        """The last steps for `GET /trace`, in Chrome's trace event format."""
        ...

    async def metrics(self) -> bytes:
        """Figures for `GET /metrics`, in Prometheus' text format."""
        ...


def create_api(
    engine: Engine,
    *,
    echo_request_id: bool = True,
    api_keys: Sequence[str] = (),
    cors_allow_origins: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The application.

    Args:
        engine: answers the requests.
        echo_request_id: return `X-Request-Id`. False behind Ray Serve's proxy, which returns the
            header itself: clients would see it twice.
        api_keys: any of them is required, see RequireApiKey; none = no key is asked for.
        cors_allow_origins: origins whose pages may call the API from a browser, "*" = all.
        max_body_bytes: larger bodies are refused.
    """
    app = FastAPI(title="DFlash", description="Speculative decoding behind the OpenAI API")
    started = int(time.time())

    @app.post("/v1/completions", response_model=Completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        check_model(engine.model_name, body.model)
        special = body.add_special_tokens is not False
        prompts = [
            await encode(engine, prompt, "prompt", add_special_tokens=special)
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompts
        ]
        requests = generation_requests(engine, prompts, body, "prompt", body.max_tokens)
        name = answer_id("cmpl", request)
        echoed = [
            prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt)
            for prompt in (body.prompts if body.echo else [])
        ]
        answer = CompletionAnswer(
            name, engine.model_name, engine.tokenizer, prompts, body, echoed=echoed
        )
        return await respond(requests, answer, body, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        check_model(engine.model_name, body.model)
        text = await render(engine.tokenizer, body.messages, body.chat_template_kwargs)
        special = body.add_special_tokens is True  # the template writes them, as a rule
        prompt = await encode(engine, text, "messages", add_special_tokens=special)
        max_tokens = body.max_completion_tokens or body.max_tokens
        requests = generation_requests(engine, [prompt], body, "messages", max_tokens)
        name = answer_id("chatcmpl", request)
        answer = ChatAnswer(name, engine.model_name, engine.tokenizer, [prompt], body)
        return await respond(requests, answer, body, request)

    async def respond(
        requests: list[GenerationRequest], answer: Answer, body: GenerationBody, request: Request
    ) -> Response:
        if body.stream:
            return EventStream(chunks(engine, requests, answer))
        try:
            await unless_client_leaves(request.receive, complete(engine, requests, answer))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(answer.whole(), media_type="application/json")

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> JSONResponse:
        check_model(engine.model_name, model)
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
        health = await engine.health()
        if health.status == "unavailable":
            raise NotReady(health.reason or "not ready")
        return JSONResponse(asdict(health))

    @app.get("/stats")
    async def stats() -> JSONResponse:
        return JSONResponse(await engine.stats())

    @app.get("/trace")
    async def trace() -> JSONResponse:
        return JSONResponse(await engine.trace())

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await engine.metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    app.include_router(tokenization_routes(engine))
    app.exception_handlers.update(EXCEPTION_HANDLERS)
    app.add_middleware(InternalErrors)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    if api_keys:
        app.add_middleware(RequireApiKey, api_keys=api_keys)
    if cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_allow_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(HeaderLimit)
    if echo_request_id:
        app.add_middleware(RequestId)
    return app


async def chunks(
    engine: Engine, requests: list[GenerationRequest], answer: Answer
) -> AsyncGenerator[str, None]:
    """The events of a streamed answer."""
    async with contextlib.aclosing(collected(engine, requests, answer)) as outputs:
        async for choice, output in outputs:
            if (chunk := answer.chunk(choice, output)) is not None:
                yield chunk
    if (chunk := answer.usage_chunk()) is not None:
        yield chunk


async def complete(engine: Engine, requests: list[GenerationRequest], answer: Answer) -> None:
    """Fills an answer that is sent as a whole."""
    async with contextlib.aclosing(collected(engine, requests, answer)) as outputs:
        async for _ in outputs:
            pass


async def collected(
    engine: Engine, requests: list[GenerationRequest], answer: Answer
) -> AsyncGenerator[tuple[int, GenerationOutput], None]:
    """The engine's outputs as they come, with their choice, each of them added to the answer."""
    sources = [engine.generate(request) for request in requests]
    async with contextlib.aclosing(interleaved(sources)) as outputs:
        async for choice, output in outputs:
            answer.add(choice, output)
            yield choice, output
    if not answer.finished:
        raise InternalError("The engine ended the output without a reason.")


def answer_id(kind: str, request: Request) -> str:
    """`X-Request-Id`, where there is one, with the prefix that OpenAI's ids have."""
    return f"{kind}-{request.headers.get('x-request-id') or uuid.uuid4().hex}"
