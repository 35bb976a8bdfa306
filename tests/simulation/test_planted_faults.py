"""The table of planted faults fits the code, and the simulated world finds what is planted."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import past_failures
from planted_faults import PACKAGE, PLANTED_FAULTS, PlantedFault, find, planted

_BY_NAME = {fault.name: fault for fault in PLANTED_FAULTS}
_QUICK = (
    "data files not synced",
    "name of the commit not synced",
    "commit before the data",
    "leftovers not cleared",
    "retention deletes one too many",
)


@pytest.mark.parametrize("fault", PLANTED_FAULTS, ids=lambda fault: fault.name)
def test_fault_applies(fault: PlantedFault) -> None:
    source = (PACKAGE / fault.file).read_text()
    planted = fault.planted(source)
    assert planted != source
    ast.parse(planted)


def test_names_are_distinct() -> None:
    assert len({fault.name for fault in PLANTED_FAULTS}) == len(PLANTED_FAULTS) >= 50


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", _QUICK)
def test_fault_is_found(name: str) -> None:
    found = find(_BY_NAME[name], histories=200)
    assert found.seed is not None, found.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize("story", past_failures.STORIES, ids=lambda story: story.__name__)
def test_what_has_failed_once_fails_without_its_mend(story: Any) -> None:
    script = Path(past_failures.__file__)
    with planted(_BY_NAME[past_failures.STORIES[story]]) as environment:
        done = subprocess.run(
            [sys.executable, str(script), "6", story.__name__],
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(f"{story.__name__} at "), done.stderr[-2000:]
