"""Installs the third party's package of docs/backend.md: a module and its dist-info folder."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "backend.md"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with that of the page."""
    site = tmp_path_factory.mktemp("site")
    info = site / "npy_backend-1.0.dist-info"
    info.mkdir()
    listings = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (site / "npy_backend.py").write_text(next(text for kind, text in listings if kind == "python"))
    (entries,) = (text for kind, text in listings if kind == "toml")
    text = entries.replace('"', "").replace("project.entry-points.", "")
    (info / "entry_points.txt").write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: npy_backend\nVersion: 1.0\n")
    return site


@pytest.fixture(autouse=True)
def on_the_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))
