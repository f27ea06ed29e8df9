"""Log probabilities in the two shapes that the OpenAI API has for them."""

from __future__ import annotations

import codecs
import re
from typing import Any

from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dflash_core.request import TokenLogprobs

UNDECIDED = "\N{REPLACEMENT CHARACTER}"
FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # how SentencePiece writes a token of one byte
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


class TokenNames:
    """What single tokens are called.

    A token that is no text by itself, such as a part of an emoji, is called `bytes:\\xf0\\x9f` as
    OpenAI does, so that different tokens have different names.

    Args:
        tokenizer: a `transformers` fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)

    def bytes(self, token_id: int) -> bytes:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if UNDECIDED not in text:
            return text.encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if match := FALLBACK.fullmatch(token):
            return bytes([int(match[1], 16)])
        if BYTE_OF.keys() >= set(token):
            return bytes(BYTE_OF[character] for character in token)
        return text.encode()

    def name(self, token_id: int) -> str:
        data = self.bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TextOffsets:
    """Where in the text of one output its tokens begin, in characters."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def append(self, token_id: int) -> int:
        """The offset of the next token; one inside a character has the character's."""
        offset = self._characters
        if token_id not in self._names.special:
            self._characters += len(self._decoder.decode(self._names.bytes(token_id)))
        return offset


def completion_logprobs(
    names: TokenNames, offsets: TextOffsets, token_ids: list[int], entries: list[TokenLogprobs]
) -> Logprobs:
    """For `/v1/completions`: the token itself is always among the top ones, as in vLLM."""
    top = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        named = {names.name(each): value for each, value in entry.top}
        top.append({names.name(token_id): entry.logprob} | named)
    return Logprobs(
        text_offset=[offsets.append(token_id) for token_id in token_ids],
        token_logprobs=[entry.logprob for entry in entries],
        tokens=[names.name(token_id) for token_id in token_ids],
        top_logprobs=top,
    )


def chat_logprobs(
    names: TokenNames, token_ids: list[int], entries: list[TokenLogprobs]
) -> ChoiceLogprobs:
    """For `/v1/chat/completions`."""
    content = [
        ChatCompletionTokenLogprob(
            token=names.name(token_id),
            bytes=list(names.bytes(token_id)),
            logprob=entry.logprob,
            top_logprobs=[
                TopLogprob(token=names.name(each), bytes=list(names.bytes(each)), logprob=value)
                for each, value in entry.top
            ],
        )
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]
    return ChoiceLogprobs(content=content, refusal=None)
