"""What Accelerate prepares, in a TorchState: the training goes on with the same losses."""

from pathlib import Path
from typing import Any

import pytest

from real_ranks import run_script

pytest.importorskip("accelerate", reason="accelerate is missing: make test-trainers")

# accelerate warns of itself.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_prepared_training_goes_on(world_size: int, tmp_path: Path) -> None:
    def run(action: str) -> list[Any]:
        script = Path(__file__).with_name("accelerate_rank.py")
        given = (action, tmp_path / "ckpt")
        reports = tmp_path / action
        return run_script(world_size, script, *given, reports=reports, timeout_seconds=200)

    assert run("save") == run("load")
