"""``dckpt selftest``: every step is one that can fail, and nothing stays behind."""

import json
from pathlib import Path

import pytest

from faults import replaced
from samples import Run


def test_all_is_well_here(dckpt: Run, tmp_path: Path) -> None:
    finished = dckpt("selftest", "--in", tmp_path)
    assert finished.code == 0
    assert finished.out.count(": ok, ") == 5
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("name", "step"), [("fsync", 0), ("preadv", 1)])
def test_what_fails_is_named(dckpt: Run, tmp_path: Path, name: str, step: int) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with replaced(f"os.{name}", fail):
        finished = dckpt("selftest", "--in", tmp_path, "--json")
    assert finished.code == 1
    steps = json.loads(finished.out)["steps"]
    assert "Input/output error" in steps[step]["problem"]
    assert all(one["problem"] is None for one in steps[:step])
