"""The picture of the rooms is that of the import contract, and the rooms are few."""

import json
from importlib import import_module
from pathlib import Path

import pytest

import dist_checkpointing

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dist_checkpointing"
NAMES = json.loads((Path(__file__).parent / "public_names.json").read_text())


def rooms() -> set[str]:
    return {
        path.stem
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists())
    } - {"__init__", "__main__"}


def test_the_picture_is_that_of_the_contract() -> None:
    house = import_module("house")
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert house.written(page) == page, "run: python docs/tools/house.py --write"
    assert {room for floor in house.floors() for room in floor} == rooms()


def test_the_house_is_small_enough_to_be_seen() -> None:
    assert len([room for room in rooms() if (PACKAGE / room).is_dir()]) <= 14
    assert len(import_module("house").floors()) <= 9


def test_each_room_keeps_to_its_budget() -> None:
    house = import_module("house")
    budgets = house.budgets((ROOT / "CONTRIBUTING.md").read_text())
    sizes = house.sizes()
    assert budgets.keys() == sizes.keys(), "run: python docs/tools/house.py --write"
    wrong = []
    for room, now in sizes.items():
        for unit, count, budget in zip(("lines", "files"), now, budgets[room], strict=True):
            if count > budget:
                wrong.append(f"{room} has {count} {unit}, its budget is {budget}")
            elif count < 0.95 * budget:
                wrong.append(
                    f"{room}, {unit}: lower the number to {count}: it only goes down"
                    " (python docs/tools/house.py --write)"
                )
    assert not wrong, "\n".join(wrong)


def test_budgets_are_lowered_and_never_raised() -> None:
    house = import_module("house")
    page = (ROOT / "CONTRIBUTING.md").read_text()
    lines, files = house.budgets(page)["comm"]
    row = f"| `comm` | {lines} | {files} |"
    assert page.count(row) == 1
    changed = house.lowered(page.replace(row, f"| `comm` | 1 | {files + 9} |"))
    assert house.budgets(changed)["comm"] == (1, house.sizes()["comm"][1])
    assert changed.partition(house.BUDGETS)[0] == page.partition(house.BUDGETS)[0]
    assert changed.partition(house.BUDGETS_END)[2] == page.partition(house.BUDGETS_END)[2]


def test_the_walk_of_a_tensor_names_files_that_are_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    walk = page.partition("The way of a tensor")[2].partition("\n\nThe middle")[0]
    names = [word for word in walk.split("`")[1::2] if word.endswith(".py")]
    assert len(names) > 10
    assert [name for name in names if not (PACKAGE / name).is_file()] == []


@pytest.mark.parametrize("module", sorted(NAMES))
def test_no_public_name_is_lost(module: str) -> None:
    found = import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


def test_every_name_of_the_package_is_on_the_list() -> None:
    assert set(dist_checkpointing.__all__) <= set(NAMES["dist_checkpointing"])
