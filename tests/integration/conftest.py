"""Good checkpoints of each backend, and a process that reads what becomes of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import hostile_state
from limited_child import LimitedChild


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good checkpoint of each backend, in a folder of its name."""
    return hostile_state.save_each(tmp_path_factory.mktemp("originals"))


@pytest.fixture(scope="session")
def child(originals: Path) -> Iterator[LimitedChild]:
    """A process with little memory that reads what it is told to."""
    warm_up = [{"do": "checkpoint", "path": str(path)} for path in sorted(originals.iterdir())]
    with LimitedChild(warm_up) as started:
        yield started
