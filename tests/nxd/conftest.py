from __future__ import annotations

from pathlib import Path

import pytest

FAKE = Path(__file__).parent / "fake"


@pytest.fixture
def nxd(monkeypatch: pytest.MonkeyPatch) -> None:
    """`neuronx_distributed` can be imported: the stand-in in `fake/`."""
    monkeypatch.syspath_prepend(str(FAKE))
