"""Text of one request, piece by piece, as its tokens arrive.

A token is not a piece of text: a character may span several tokens, and some tokenizers drop the
space before the very first one. So a few recent tokens are decoded again with every step (the
window), and only text that later tokens cannot change is handed out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

UNDECIDED = "\N{REPLACEMENT CHARACTER}"  # what decoding makes of the bytes of half a character
MAX_PENDING = 12  # tokens that may wait for a character to complete; a character has <= 4 bytes
CHARACTER = 4  # bytes of the longest UTF-8 sequence, hence tokens that one can span


class Detokenizer:
    """Incremental `tokenizer.decode(ids, skip_special_tokens=True)`.

    The texts of all `append` calls and of the final `flush` add up to exactly that, with
    `clean_up_tokenization_spaces=False`, for byte-level tokenizers (Llama 3, SmolLM2) whatever the
    ids. A tokenizer with byte *fallback* (Llama 2) rewrites a whole run of byte tokens when a later
    one makes it invalid UTF-8; text already handed out then stays as it was. Each call costs two
    short decodings as a rule, however long the output is.

    Args:
        tokenizer: a `transformers` fast tokenizer or a `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._skipped = {token_id for token_id, token in added.items() if token.special}
        self._window: list[int] = []
        self._context = 0  # leading tokens of the window: handed out, there for their neighbours
        self._emitted = 0  # characters of their text

    def append(self, token_ids: Iterable[int]) -> str:
        """Adds tokens, any number of them; returns the text that is certain now."""
        self._window += [token_id for token_id in token_ids if self._has_text(token_id)]
        size = len(self._window)
        for end in range(size, max(self._context, size - CHARACTER), -1):
            text = self._decode(self._window[:end])
            if len(text) > self._emitted and not text.endswith(UNDECIDED):
                delta = text[self._emitted :]
                self._window = self._window[self._context :]
                self._context = end - self._context
                self._emitted = len(self._decode(self._window[: self._context]))
                return delta
        if size - self._context > MAX_PENDING:
            return self._give_up_on_invalid_bytes()
        return ""

    def flush(self) -> str:
        """Ends the output: returns what was held back, half characters as U+FFFD."""
        text = self._decode(self._window)[self._emitted :]
        self._window, self._context, self._emitted = [], 0, 0
        return text

    def _give_up_on_invalid_bytes(self) -> str:
        # No character needs that many tokens, so these bytes are not UTF-8 and most of their
        # U+FFFD are final. Cut where the two sides decode independently: what follows the cut has
        # already decided how the bytes before it decode.
        text = self._decode(self._window)
        for cut in range(len(self._window) - 1, self._context, -1):
            head = self._decode(self._window[:cut])
            if head + self._decode(self._window[cut:]) == text:
                delta = head[self._emitted :]
                self._window, self._context, self._emitted = self._window[cut:], 0, 0
                return delta
        return ""

    def _has_text(self, token_id: int) -> bool:
        # Special tokens are skipped; ids of padding rows in the model's vocabulary are no tokens.
        return token_id not in self._skipped and self._tokenizer.id_to_token(token_id) is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
