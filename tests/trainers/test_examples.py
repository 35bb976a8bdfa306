"""The examples with trainers go on with the losses that they would have had."""

import importlib.util
from pathlib import Path

import pytest

import dist_checkpointing
from scripts import run_fresh

EXAMPLES = Path(dist_checkpointing.__file__).parents[1] / "examples"

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="not a checkout")


def told(name: str, *arguments: object) -> list[str]:
    """What an example says of its steps."""
    finished = run_fresh(EXAMPLES / f"{name}.py", *arguments, timeout=200)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [line for line in finished.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize(
    ("name", "library", "option", "part", "whole"),
    [
        ("hf_training", "transformers", "--steps", 8, 16),
        ("accelerate_training", "accelerate", "--steps", 8, 12),
        ("lightning_training", "lightning", "--epochs", 2, 4),
    ],
)
def test_an_example_resumes(
    name: str, library: str, option: str, part: int, whole: int, tmp_path: Path
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is missing: make test-trainers")
    expected = told(name, tmp_path / "whole", option, whole)
    first = told(name, tmp_path / "run", option, part)
    second = told(name, tmp_path / "run", option, whole)
    assert len(first) < len(expected)
    assert first == expected[: len(first)]
    assert second == expected[-len(second) :]
    assert len(second) in (len(expected), len(expected) - len(first))
