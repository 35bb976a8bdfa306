"""Installs the third party's package: its module and its dist-info folder are on the path."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def installed_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
