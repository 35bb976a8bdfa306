"""The layer for Megatron on two processes."""

from __future__ import annotations

from pathlib import Path

from real_ranks import run_script


def test_two_ranks_use_the_layer(tmp_path: Path) -> None:
    script = Path(__file__).with_name("layer_rank.py")
    place = tmp_path / "place"
    place.mkdir()
    reports = tmp_path / "reports"
    ranks = run_script(2, script, place, reports=reports, timeout_seconds=120)
    for found in ranks:
        # The cut one first, then the larger of those that both have.
        assert found["writers"] == {"large": 0, "small": 1}
        assert found["left"] == ["large", "small"]
        assert found["files"] == ["__0_0.distcp", "__1_0.distcp"]
        assert found["refused"]
        assert found["logged_without"] == []
        assert (found["finalized"], found["async"]) == ([0], [2.0] * 4 + [3.0] * 4)
    written = [found["written"] for found in ranks]
    assert written == [found["read"] for found in ranks] == [["cut", "large"], ["cut", "small"]]
    assert [found["replica_ids"] for found in ranks] == [
        {"large": 0, "small": 1, "cut": 0},
        {"large": 1, "small": 0, "cut": 0},
    ]
    assert [found["planned_ids"]["large"] for found in ranks] == [0, 1], "of the caller"
    assert [found["tensors"] for found in ranks] == [2, 2]
    assert [found["tensors_again"] for found in ranks] == [2, 2]
    assert ranks[0]["logged"] == []
    (logged,) = ranks[1]["logged"]
    assert logged == (
        "Rank 1 common state dict differs from rank 0 common state dict. Keys only on rank 0: [], "
        "Keys only on 1: [], Mismatched keys: [(('rank',), <class 'int'>, <class 'int'>)]"
    )
    assert "Invalid access pattern" in ranks[0]["invalid"]
    assert "invalid" not in ranks[1]
