"""The table of planted faults fits the code, and the simulated world finds what is planted."""

import ast

import pytest

from planted_faults import PACKAGE, PLANTED_FAULTS, PlantedFault, find

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
    fault = next(fault for fault in PLANTED_FAULTS if fault.name == name)
    found = find(fault, histories=200)
    assert found.seed is not None, found.reason
