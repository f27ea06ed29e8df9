"""The tokenizer of a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_core.errors import CheckpointError


def load_tokenizer(folder: str | Path) -> Any:
    """A transformers fast tokenizer, from local files only and without code from the checkpoint.

    Raises CheckpointError.
    """
    from transformers import AutoTokenizer  # slow to import, and only the ingress needs it

    if not (Path(folder) / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{folder}: there is no tokenizer.json; copy the tokenizer of the model next to its "
            "config.json"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception on a damaged file
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
