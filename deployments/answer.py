"""The answer to one request in the shapes of the OpenAI API, streamed or whole.

Fields that the API defines are always there, null where there is nothing to say; fields that only
vLLM has (`stop_reason`, `token_ids`, `metrics`) follow vLLM.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from pydantic import BaseModel

from deployments.openai_protocol import GenerationBody, StreamedCompletionChoice, StreamOptions
from dflash_core.request import GenerationOutput


class Answer(ABC):
    """Collects the outputs of a request and writes them as JSON.

    Args:
        answer_id, model: the names to give in the answer.
        prompt_token_ids: counted, and returned to those who ask for ids.
        body: what the client wants reported.
    """

    def __init__(
        self, answer_id: str, model: str, prompt_token_ids: list[int], body: GenerationBody
    ) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._common: dict[str, Any] = {
            "id": answer_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._with_ids = bool(body.return_token_ids)
        options = body.stream_options or StreamOptions()
        self._with_usage = bool(options.include_usage)
        self._with_usage_always = self._with_usage and bool(options.continuous_usage_stats)
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._num_chunks = 0
        self._last: GenerationOutput | None = None

    @property
    def finished(self) -> bool:
        return self._last is not None and self._last.finish_reason is not None

    def add(self, output: GenerationOutput) -> None:
        self._token_ids += output.token_ids
        self._texts.append(output.text)
        self._last = output

    def chunk(self, output: GenerationOutput) -> str | None:
        """One event of the stream; None where the output has nothing to show yet."""
        if not (output.text or output.finish_reason or self._with_ids):
            return None
        first = self._num_chunks == 0
        self._num_chunks += 1
        fields = self._common | self._metrics(output)
        if self._with_usage:
            fields["usage"] = self._usage() if self._with_usage_always else None
        return dump(self._make_chunk(output, first, fields))

    def usage_chunk(self) -> str | None:
        """The event after the last choice, if the client wants it."""
        if not self._with_usage:
            return None
        return dump(self._make_chunk(None, False, self._common | {"usage": self._usage()}))

    def whole(self) -> str:
        """The answer to a request that is not streamed."""
        assert self._last is not None and self.finished
        fields = self._common | self._metrics(self._last) | {"usage": self._usage()}
        return dump(self._make_whole("".join(self._texts), self._last, fields))

    def _usage(self) -> CompletionUsage:
        prompt, completion = len(self._prompt_token_ids), len(self._token_ids)
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
        )

    def _metrics(self, output: GenerationOutput) -> dict[str, Any]:
        return {} if output.statistics is None else {"metrics": output.statistics}

    def _choice_fields(self, output: GenerationOutput, token_ids: list[int]) -> dict[str, Any]:
        fields = {
            "index": 0,
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return fields | ({"token_ids": token_ids} if self._with_ids else {})

    def _prompt_fields(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_token_ids} if self._with_ids else {}

    @abstractmethod
    def _make_chunk(
        self, output: GenerationOutput | None, first: bool, fields: dict[str, Any]
    ) -> BaseModel:
        """An event; without a choice where `output` is None."""

    @abstractmethod
    def _make_whole(self, text: str, last: GenerationOutput, fields: dict[str, Any]) -> BaseModel:
        """Everything at once."""


class CompletionAnswer(Answer):
    """For `/v1/completions`."""

    def _make_chunk(
        self, output: GenerationOutput | None, first: bool, fields: dict[str, Any]
    ) -> BaseModel:
        choices: list[CompletionChoice] = []
        if output is not None:
            options = self._choice_fields(output, output.token_ids)
            options |= self._prompt_fields() if first else {}
            choices.append(StreamedCompletionChoice(text=output.text, **options))
        return Completion(object="text_completion", choices=choices, **fields)

    def _make_whole(self, text: str, last: GenerationOutput, fields: dict[str, Any]) -> BaseModel:
        options = self._choice_fields(last, self._token_ids) | self._prompt_fields()
        choice = CompletionChoice(text=text, **options)
        return Completion(object="text_completion", choices=[choice], **fields)


class ChatAnswer(Answer):
    """For `/v1/chat/completions`; the role comes with the first text, not ahead of it."""

    def _make_chunk(
        self, output: GenerationOutput | None, first: bool, fields: dict[str, Any]
    ) -> BaseModel:
        choices: list[ChunkChoice] = []
        if output is not None:
            role = {"role": "assistant"} if first else {}
            delta = ChoiceDelta(content=output.text, **role)
            options = self._choice_fields(output, output.token_ids)
            choices.append(ChunkChoice(delta=delta, **options))
        fields |= self._prompt_fields() if first else {}
        return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **fields)

    def _make_whole(self, text: str, last: GenerationOutput, fields: dict[str, Any]) -> BaseModel:
        message = ChatCompletionMessage(role="assistant", content=text, refusal=None)
        choice = Choice(message=message, **self._choice_fields(last, self._token_ids))
        fields |= self._prompt_fields()
        return ChatCompletion(object="chat.completion", choices=[choice], **fields)


def dump(answer: BaseModel) -> str:
    return answer.model_dump_json(exclude_unset=True)
