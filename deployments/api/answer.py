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
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.completion_choice import Logprobs
from pydantic import BaseModel

from deployments.api.logprobs import TextOffsets, TokenNames, chat_logprobs, completion_logprobs
from deployments.api.openai_protocol import GenerationBody, StreamedCompletionChoice, StreamOptions
from dflash_core.request import GenerationOutput, TokenLogprobs


class ChoiceState:
    """What has come of one choice so far."""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.offsets: TextOffsets | None = None
        self.streamed = False
        self.last: GenerationOutput | None = None

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.finish_reason is not None

    def add(self, output: GenerationOutput) -> None:
        self.token_ids += output.token_ids
        self.texts.append(output.text)
        self.logprobs += output.logprobs or []
        self.last = output


class Answer(ABC):
    """Collects the outputs of a request's choices and writes them as JSON.

    Args:
        answer_id, model: the names to give in the answer.
        tokenizer: names the tokens of log probabilities.
        prompts: token ids, counted, and returned to those who ask for ids; each has as many
            choices as `body.n` says.
        body: what the client wants reported.
    """

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Any,
        prompts: list[list[int]],
        body: GenerationBody,
    ) -> None:
        self._common: dict[str, Any] = {
            "id": answer_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._prompts = prompts
        self._choices = [ChoiceState(prompt) for prompt in prompts for _ in range(body.n or 1)]
        self._with_ids = bool(body.return_token_ids)
        self._names = None if body.num_logprobs is None else TokenNames(tokenizer)
        options = body.stream_options or StreamOptions()
        self._with_usage = bool(options.include_usage)
        self._with_usage_always = self._with_usage and bool(options.continuous_usage_stats)

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    def add(self, index: int, output: GenerationOutput) -> None:
        self._choices[index].add(output)

    def chunk(self, index: int, output: GenerationOutput) -> str | None:
        """One event of the stream; None where the output has nothing to show yet."""
        with_tokens = self._with_ids or self._names is not None
        if not (output.text or output.finish_reason or with_tokens):
            return None
        fields = self._common | self._metrics(output)
        if self._with_usage:
            fields["usage"] = self._usage() if self._with_usage_always else None
        event = dump(self._make_chunk(index, output, fields))
        self._choices[index].streamed = True
        return event

    def usage_chunk(self) -> str | None:
        """The event after the last choice, if the client wants it."""
        if not self._with_usage:
            return None
        return dump(self._make_chunk(0, None, self._common | {"usage": self._usage()}))

    def whole(self) -> str:
        """The answer to a request that is not streamed."""
        assert self.finished
        fields = self._common | {"usage": self._usage()}
        if len(self._choices) == 1:
            fields |= self._metrics(self._choices[0].last)
        return dump(self._make_whole(fields))

    def _usage(self) -> CompletionUsage:
        prompt = sum(map(len, self._prompts))
        completion = sum(len(choice.token_ids) for choice in self._choices)
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
        )

    def _metrics(self, output: GenerationOutput) -> dict[str, Any]:
        return {} if output.statistics is None else {"metrics": output.statistics}

    def _choice_fields(
        self,
        index: int,
        end: GenerationOutput,
        token_ids: list[int],
        entries: list[TokenLogprobs] | None,
    ) -> dict[str, Any]:
        logprobs = None
        if self._names is not None:
            logprobs = self._make_logprobs(index, self._names, token_ids, entries or [])
        fields = {
            "index": index,
            "logprobs": logprobs,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }
        return fields | ({"token_ids": token_ids} if self._with_ids else {})

    def _streamed_fields(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        return self._choice_fields(index, output, output.token_ids, output.logprobs)

    def _whole_fields(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        return self._choice_fields(index, choice.last, choice.token_ids, choice.logprobs)

    def _prompt_fields(self, index: int) -> dict[str, Any]:
        prompt = self._choices[index].prompt_token_ids
        return {"prompt_token_ids": prompt} if self._with_ids else {}

    @abstractmethod
    def _make_logprobs(
        self, index: int, names: TokenNames, token_ids: list[int], entries: list[TokenLogprobs]
    ) -> BaseModel:
        """Of the next tokens of a choice."""

    @abstractmethod
    def _make_chunk(
        self, index: int, output: GenerationOutput | None, fields: dict[str, Any]
    ) -> BaseModel:
        """An event; without a choice where `output` is None."""

    @abstractmethod
    def _make_whole(self, fields: dict[str, Any]) -> BaseModel:
        """Everything at once."""


class CompletionAnswer(Answer):
    """For `/v1/completions`.

    Args:
        echoed: the texts of the prompts where the client wants them ahead of the answers, else
            empty.
        others: as for every answer.
    """

    def __init__(self, *others: Any, echoed: list[str]) -> None:
        super().__init__(*others)
        self._echoed = echoed

    def _echo(self, index: int) -> str:
        """What goes before the text of a choice."""
        if not self._echoed:
            return ""
        return self._echoed[index * len(self._echoed) // len(self._choices)]

    def _make_logprobs(
        self, index: int, names: TokenNames, token_ids: list[int], entries: list[TokenLogprobs]
    ) -> Logprobs:
        choice = self._choices[index]
        if choice.offsets is None:
            choice.offsets = TextOffsets(names)
        return completion_logprobs(names, choice.offsets, token_ids, entries)

    def _make_chunk(
        self, index: int, output: GenerationOutput | None, fields: dict[str, Any]
    ) -> BaseModel:
        choices: list[CompletionChoice] = []
        if output is not None:
            options, text = self._streamed_fields(index, output), output.text
            if not self._choices[index].streamed:
                options |= self._prompt_fields(index)
                text = self._echo(index) + text
            choices.append(StreamedCompletionChoice(text=text, **options))
        return Completion(object="text_completion", choices=choices, **fields)

    def _make_whole(self, fields: dict[str, Any]) -> BaseModel:
        choices = [
            CompletionChoice(
                text=self._echo(index) + "".join(choice.texts),
                **self._whole_fields(index),
                **self._prompt_fields(index),
            )
            for index, choice in enumerate(self._choices)
        ]
        return Completion(object="text_completion", choices=choices, **fields)


class ChatAnswer(Answer):
    """For `/v1/chat/completions`; the role comes with the first text, not ahead of it."""

    def _make_logprobs(
        self, index: int, names: TokenNames, token_ids: list[int], entries: list[TokenLogprobs]
    ) -> ChoiceLogprobs:
        return chat_logprobs(names, token_ids, entries)

    def _make_chunk(
        self, index: int, output: GenerationOutput | None, fields: dict[str, Any]
    ) -> BaseModel:
        choices: list[ChunkChoice] = []
        first = not any(choice.streamed for choice in self._choices)
        if output is not None:
            role = {} if self._choices[index].streamed else {"role": "assistant"}
            delta = ChoiceDelta(content=output.text, **role)
            options = self._streamed_fields(index, output)
            logprobs = options.pop("logprobs")
            streamed = logprobs and ChunkLogprobs(**dict(logprobs))
            choices.append(ChunkChoice(delta=delta, logprobs=streamed, **options))
        fields |= self._prompt_fields(0) if first else {}
        return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **fields)

    def _make_whole(self, fields: dict[str, Any]) -> BaseModel:
        choices = []
        for index, choice in enumerate(self._choices):
            text = "".join(choice.texts)
            message = ChatCompletionMessage(role="assistant", content=text, refusal=None)
            choices.append(Choice(message=message, **self._whole_fields(index)))
        fields |= self._prompt_fields(0)
        return ChatCompletion(object="chat.completion", choices=choices, **fields)


def dump(answer: BaseModel) -> str:
    return answer.model_dump_json(exclude_unset=True)
