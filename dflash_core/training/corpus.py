"""Conversations to begin with: compressed sets that are small enough to live in a repository.

`pack` writes a project's sets as `<part>.jsonl.xz`; a project whose settings name their folder as
`corpus` starts from them instead of from nothing.
"""

from __future__ import annotations

import lzma
from pathlib import Path

from dflash_core.training.errors import TrainingError
from dflash_core.training.project import Project, replace_file

PARTS = ("train", "held_out")


def unpack(project: Project) -> list[Path]:
    """Bring the corpus's sets into the project's folder, unless it already has its own.

    Returns the files written. Raises TrainingError: no such set, or a damaged one.
    """
    if project.settings.corpus is None:
        return []
    folder = Path(project.settings.corpus).expanduser()
    written = []
    for part in PARTS:
        packed, path = folder / f"{part}.jsonl.xz", project.path(f"{part}.jsonl")
        if path.exists():
            continue
        try:
            data = lzma.decompress(packed.read_bytes())
        except (OSError, lzma.LZMAError) as error:
            raise TrainingError(f"corpus: {packed} cannot be read: {error}") from error
        replace_file(path, data)
        written.append(path)
    return written


def pack(project: Project, folder: Path) -> list[Path]:
    """Write the project's sets into `folder`. Raises TrainingError: a set that is not there."""
    written = []
    for part in PARTS:
        lines = "".join(conversation.line() for conversation in project.conversations(part))
        path = folder / f"{part}.jsonl.xz"
        replace_file(path, lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))
        written.append(path)
    return written
