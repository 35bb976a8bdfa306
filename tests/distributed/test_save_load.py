"""Save and load over real processes and gloo; what a rank does is in save_load_rank.py."""

import runpy
from pathlib import Path

import pytest

from real_ranks import run_script, torchrun

pytestmark = pytest.mark.timeout(120)

SCRIPT = Path(__file__).parent / "save_load_rank.py"


@pytest.mark.parametrize(("save_world", "load_world"), [(2, 4), (3, 2)])
def test_other_numbers_of_processes(tmp_path: Path, save_world: int, load_world: int) -> None:
    """And one process without any process group."""
    start = torchrun if save_world == 2 else run_script  # once as a user starts ranks
    reports = tmp_path / "reports"
    start(save_world, SCRIPT, "save", tmp_path, reports=reports, timeout_seconds=60)
    wrong = run_script(load_world, SCRIPT, "load", tmp_path, reports=reports, timeout_seconds=60)
    assert wrong == [[]] * load_world
    assert runpy.run_path(str(SCRIPT))["load_all"](tmp_path, 0, 1) == []
