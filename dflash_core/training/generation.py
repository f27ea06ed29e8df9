"""Conversations in the target's own words: what the drafter will have to predict.

The target continues its own chat template, so it writes the user's question as well (as in Magpie,
arXiv 2406.08464), and then answers it. Every row of the batch is a conversation of its own; a
finished one is replaced at once, so all rows always work. Prompts from a file go the same way, with
the question forced token by token.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_core.target import LlamaTarget
from dflash_core.training.conversations import Conversation
from dflash_core.training.decoding import RowsDecoder
from dflash_core.training.errors import TrainingError
from dflash_core.training.prompts import ChatTemplate
from dflash_core.training.workers import Workers

PATIENCE = 20  # useless questions per row before it is an error


@dataclass(frozen=True)
class GenerationSettings:
    """Sizes in tokens.

    Attributes:
        rows: conversations at a time.
        max_question, max_answer: longer questions are dropped, longer answers end there.
        sampled: share of answers that are sampled at temperature 1; the others are greedy.
        temperature, top_k: of questions and sampled answers.
    """

    rows: int = 192
    max_question: int = 64
    max_answer: int = 160
    sampled: float = 0.1
    temperature: float = 1.0
    top_k: int = 64


@dataclass
class _Row:
    tokens: list[int]
    greedy: bool
    forced: deque[int] = field(default_factory=deque)
    answer: int | None = None  # where the answer begins, once the question has ended


class Generator:
    """An endless source of conversations.

    Args:
        model: the target.
        template: its chat template.
        questions: token ids of given questions; None to let the target write them.
        seed: of the sampling.
        workers: share the rows of a step.
    """

    def __init__(
        self,
        model: LlamaTarget,
        template: ChatTemplate,
        settings: GenerationSettings,
        *,
        questions: Iterator[tuple[int, ...]] | None = None,
        seed: int = 0,
        workers: Workers,
    ) -> None:
        self.model = model
        self.template = template
        self.settings = settings
        self.questions = questions
        self.random = torch.Generator().manual_seed(seed)
        self.stops = frozenset(model.config.eos_token_ids)
        self.tokens_run = 0
        self._remaining: int | None = None
        longest = len(template.head) + settings.max_question + len(template.bridge)
        self.workers = workers
        self.parts = workers.split(settings.rows)
        self.decoders = [
            RowsDecoder(model, rows=part.stop - part.start, max_len=longest + settings.max_answer)
            for part in self.parts
        ]

    @torch.inference_mode()
    def run(self, limit: int | None = None) -> Iterator[Conversation]:
        """Conversations as they are finished; ends only with the given questions.

        A `limit` is one on the conversations that are begun. All of them are finished: to stop at
        so many finished ones would leave out the longest. Questions that come to nothing count.

        Raises TrainingError: the target does not end its questions.
        """
        self._remaining = limit
        # All rows begin with the same tokens, whose keys and values no row ever overwrites.
        for decoder in self.decoders:
            decoder.fill(self.template.head)
        rows = [self._new_row() for _ in range(self.settings.rows)]
        useless = 0  # questions since the last conversation that came to nothing
        while any(row is not None for row in rows):
            chosen = self._step(rows)
            for index, row in enumerate(rows):
                if row is None:
                    continue
                if row.forced:
                    row.tokens.append(row.forced.popleft())
                    continue
                row.tokens.append(chosen[index])
                finished, conversation = self._advance(row)
                if conversation is not None:
                    useless = 0
                    yield conversation
                if finished:
                    useless += conversation is None
                    rows[index] = self._new_row()
            if useless > PATIENCE * self.settings.rows:
                raise TrainingError(
                    f"the target has begun {useless} questions and ended none within max_question "
                    f"= {self.settings.max_question} tokens; it is hardly a chat model: set "
                    "`prompts` to a file with questions"
                )

    def _advance(self, row: _Row) -> tuple[bool, Conversation | None]:
        """After a token of the target's own: whether the row is done, and what it has become."""
        token, length, head = row.tokens[-1], len(row.tokens), len(self.template.head)
        if row.answer is None:
            if token in self.stops or token == self.template.bridge[0]:
                row.tokens.pop()
                row.answer = length - 1 + len(self.template.bridge)
                row.forced.extend(self.template.bridge)
                row.tokens.append(row.forced.popleft())
                return length - 1 == head, None  # an empty question is none
            return length - head > self.settings.max_question, None
        if token in self.stops or length - row.answer == self.settings.max_answer:
            return True, Conversation(tuple(row.tokens), row.answer, row.greedy)
        return False, None

    def _new_row(self) -> _Row | None:
        if self._remaining == 0:
            return None
        if self._remaining is not None:
            self._remaining -= 1
        greedy = torch.rand((), generator=self.random).item() >= self.settings.sampled
        row = _Row(list(self.template.head), greedy)
        if self.questions is not None:
            question = next(self.questions, None)
            if question is None:
                return None
            row.forced.extend((*question, *self.template.bridge))
            row.answer = len(self.template.prompt(question))
        return row

    def _step(self, rows: list[_Row | None]) -> list[int]:
        tokens = [row.tokens[-1] if row else 0 for row in rows]
        starts = [len(row.tokens) - 1 if row else 0 for row in rows]
        self.tokens_run += sum(row is not None for row in rows)
        tokens_R, starts_R = torch.tensor(tokens), torch.tensor(starts)

        @torch.inference_mode()
        def run(part: int) -> tuple[Tensor, Tensor]:
            rows = self.parts[part]
            logits_RV = self.model.logits(self.decoders[part].step(tokens_R[rows], starts_R[rows]))
            return logits_RV, logits_RV.max(-1).indices  # argmax, four times as fast

        logits, chosen = zip(*self.workers.map(run, range(len(self.parts))), strict=True)
        logits_RV, chosen_R = torch.cat(logits), torch.cat(chosen)
        sampling = [
            index
            for index, row in enumerate(rows)
            if row and not row.forced and (row.answer is None or not row.greedy)
        ]
        if sampling:
            top_k = min(self.settings.top_k, logits_RV.shape[1])
            top, ids = logits_RV[sampling].float().topk(top_k)
            probabilities = (top / self.settings.temperature).softmax(-1)
            pick = torch.multinomial(probabilities, 1, generator=self.random)
            chosen_R[sampling] = ids.gather(1, pick)[:, 0]
        return chosen_R.tolist()
