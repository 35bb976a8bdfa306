"""TorchState on real ranks: a training that goes on, and every parallelism into every other."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dist_checkpointing import load_tensors_metadata
from real_ranks import run_script

SCRIPT = Path(__file__).with_name("torch_state_rank.py")
LAYOUTS = {"plain": 1, "ddp": 2, "fsdp": 2, "tp": 2, "fsdp-of-4": 4, "fsdp+tp": 4, "hsdp": 4}

SAVED = [layout for layout in LAYOUTS if layout != "fsdp-of-4"]
# One process is in test_torch_state.py; "fsdp" and "tp" are halves of "fsdp+tp", and "hsdp" is
# "fsdp" with replicas.
RESUMED = ["ddp", "fsdp+tp"]
Saved = Callable[[str], tuple[Path, list[Any]]]


def run(action: str, layout: str, checkpoint: Path, reports: Path) -> list[Any]:
    name = layout.removesuffix("-of-4")
    return run_script(
        LAYOUTS[layout], SCRIPT, action, name, checkpoint, reports=reports, timeout_seconds=120
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Makes a checkpoint of a layout, once, and tells what its ranks did after the save."""
    root = tmp_path_factory.mktemp("torch_state")

    @cache
    def save(layout: str) -> tuple[Path, list[Any]]:
        return root / layout, run("save", layout, root / layout, root / f"{layout}-reports")

    return save


@pytest.mark.parametrize("layout", RESUMED)
def test_a_training_goes_on_with_the_same_losses(layout: str, saved: Saved, tmp_path: Path) -> None:
    checkpoint, reports = saved(layout)
    assert run("load", layout, checkpoint, tmp_path / "reports") == reports


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fsdp", "plain"),
        ("plain", "fsdp+tp"),
        ("ddp", "fsdp-of-4"),
        ("tp", "hsdp"),
        ("fsdp+tp", "ddp"),
        ("hsdp", "tp"),
    ],
)
def test_every_parallelism_into_another(one: str, other: str, saved: Saved, tmp_path: Path) -> None:
    checkpoint, (expected, *_) = saved(one)
    found = run("load", other, checkpoint, tmp_path / "reports")
    assert len(expected["digests"]) == 4 * 13
    assert [report["step"] for report in found] == [expected["step"]] * LAYOUTS[other]
    assert all(report["digests"] == expected["digests"] for report in found)
    assert all(report["rates"] == expected["rates"] for report in found)


@pytest.mark.exhaustive
def test_the_checkpoints_name_the_same_tensors(saved: Saved) -> None:
    stored = []
    for layout in SAVED:
        tensors = load_tensors_metadata(saved(layout)[0])
        stored.append({key: leaf.global_shape for key, leaf in tensors.items()})
    assert stored == [stored[0]] * len(SAVED)
    assert "model.embed.weight" in stored[0]
    assert "model.head.weight" not in stored[0]


def test_several_models_and_objects_of_dtensors(tmp_path: Path) -> None:
    script = SCRIPT.with_name("torch_state_objects_rank.py")
    reports = tmp_path / "reports"
    for report in run_script(2, script, tmp_path, reports=reports, timeout_seconds=120):
        assert report["keys"] == [
            f"model.{i}.{name}" for i in (0, 1) for name in ("bias", "weight")
        ]
        assert report["same"]
        assert "'averages': it has DTensors, and other values that differ" in report["mixed"]
        assert "ZeroRedundancyOptimizer keeps its state outside" in report["zero"]
        assert report["nests"] == [True, True]
