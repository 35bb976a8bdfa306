import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dist_checkpointing import Checkpoint
from dist_checkpointing.comm import Comm
from dist_checkpointing.format import (
    Box,
    CheckpointingConfig,
    Index,
    StoredTensor,
    dtypes,
    write_index,
)
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from dist_checkpointing.tools import app
from states import BACKEND, rows, save_on, shard as replicated

RUNNER = CliRunner()

QKV, PROJ, NORM = "layers.linear_qkv.weight", "layers.linear_proj.weight", "norm.weight"


def saved(folder: Path, backend: Any, side: int = 256) -> Path:
    def state(comm: Comm) -> dict[str, Any]:
        halves = {key: rows(key, torch.ones(side, side), comm) for key in (QKV, PROJ)}
        return {**halves, NORM: replicated(NORM, torch.ones(side), replica_id=comm.rank)}

    save_on(2, state, folder, backend)
    return folder


def invoke(*arguments: object, exit_code: int = 0) -> str:
    result = RUNNER.invoke(app.app, ["plan", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return result.stdout


def planned(*arguments: object, exit_code: int = 0) -> Any:
    return json.loads(invoke(*arguments, "--json", exit_code=exit_code))


@BACKEND
def test_bytes_and_files_of_a_load_on_four_ranks(tmp_path: Path, backend: Any) -> None:
    side = 256
    folder = saved(tmp_path / "c", backend, side)
    plan = planned(folder, "--tp", 4, "--dp", 2)
    assert plan["num_ranks"] == 8
    assert [rank["ranks"] for rank in plan["ranks"]] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    cut = side * side * 4 // 4
    assert {rank["wanted_bytes"] for rank in plan["ranks"]} == {2 * cut + side * 4}
    assert plan["wanted_bytes"] == 2 * 4 * (2 * cut + side * 4)
    assert plan["read_bytes"] == 2 * plan["read_bytes_if_shared"]
    assert {c["key"]: c["axis"] for c in plan["cuts"]} == {QKV: 0, PROJ: 1, NORM: None}
    assert plan["findings"] == []


@BACKEND
def test_the_files_it_names_are_those_that_are_needed(tmp_path: Path, backend: Any) -> None:
    folder = saved(tmp_path / "c", backend)
    (first, _) = planned(folder, "--tp", 2)["ranks"]
    named = set(first["files"])
    wanted = [(QKV, Box((0, 0), (128, 256))), (PROJ, Box((0, 0), (256, 128)))]
    wanted.append((NORM, Box((0,), (256,))))
    data = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix == ".distcp"
        or path.parent.parent.name == "data"
        or (
            "zarr" in backend
            and path.parent.parent == folder
            and path.name[0] in "c0123456789"
            and path.parent.name != ".dckpt"
        )
    }
    assert named <= data
    for name in data - named:
        (folder / name).unlink()
    tensors = Checkpoint.open(folder).read(wanted)
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    for name in named:
        (folder / name).rename(tmp_path / "aside")
        (finding,) = planned(folder, "--tp", 2, exit_code=1)["findings"][:1]
        assert finding["problem"] == "a file that would be read is missing"
        (tmp_path / "aside").rename(folder / name)


def test_what_is_read_is_what_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dist_checkpointing.filesystem import ranged_reads

    folder = saved(tmp_path / "c", ("zarr", 2), 1024)
    counts: list[int] = []
    own = ranged_reads.pread

    def counting(descriptor: int, target: Any, offset: int) -> None:
        counts.append(target.nbytes)
        own(descriptor, target, offset)

    monkeypatch.setattr(ranged_reads, "pread", counting)
    (cost, *_) = planned(folder, "--tp", 4, "--shard", ".*layers.*=0")["ranks"]
    assert counts == []
    boxes = [(key, Box((0, 0), (256, 1024))) for key in (QKV, PROJ)]
    Checkpoint.open(folder).read([*boxes, (NORM, Box((0,), (1024,)))])
    assert sum(counts) == cost["read_bytes"] == cost["wanted_bytes"]


def test_compressed_chunks_are_read_whole(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", Zarr3SaveShardedStrategy(codec="zstd"))
    plan = planned(folder, "--tp", 4, "--shard", ".*=none", "--shard", f"{NORM}=0")
    every = sum((folder / name).stat().st_size for name in plan["files"])
    assert {rank["read_bytes"] for rank in plan["ranks"]} == {every}
    rows = planned(folder, "--tp", 4, "--shard", ".*layers.*=0")["ranks"]
    # A quarter of the rows lies in half of the chunks.
    assert rows[0]["read_bytes"] == sum((folder / n).stat().st_size for n in rows[0]["files"])
    assert len(rows[0]["files"]) == 3


def test_a_checkpoint_far_larger_than_memory(tmp_path: Path) -> None:
    shape, chunk = (2**22, 2**22), (2**19, 2**22)
    stored = StoredTensor("lm_head.weight", dtypes.from_name("bfloat16"), shape, chunk)
    (tmp_path / ".dckpt").mkdir()
    write_index(Index.of([stored]), tmp_path)
    config = CheckpointingConfig("zarr", 2)
    content = {name: getattr(config, name) for name in config.__match_args__}
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    plan = planned(tmp_path, "--tp", 8, exit_code=1)
    assert [rank["wanted_bytes"] for rank in plan["ranks"]] == [2 * 2**44 // 8] * 8
    assert [rank["files"] for rank in plan["ranks"]] == [
        [f"lm_head.weight/c.{i}.0"] for i in range(8)
    ]
    assert len(plan["findings"]) == 8


# What a person sees.


def test_many_ranks_are_summed_up(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", "tensorstore")
    text = invoke(folder, "--tp", 64)
    assert [line.split()[0] for line in text.splitlines() if line[:3] in ("min", "med", "max")] == [
        "min",
        "median",
        "max",
    ]
    assert "whole on every rank, no rule matches: 1 tensor, 1.0 KiB" in text


def test_where_nothing_says_how_to_cut_tensors_are_whole(tmp_path: Path) -> None:
    states = {"blocks.0.attn.qkv": torch.ones(16, 64), "blocks.1.attn.qkv": torch.ones(16, 64)}
    save_on(2, lambda comm: {k: rows(k, v, comm) for k, v in states.items()}, tmp_path, "zarr")
    text, rule = invoke(tmp_path, "--tp", 8), "{x*}.attn.qkv"
    assert "whole on every rank, no rule matches: 2 tensors, 8.0 KiB" in text
    assert "  blocks.*.attn.qkv  (2)\nTo shard them, say how: --shard PATTERN=AXIS" in text
    assert "sharded along axis 1: 2 tensors" in invoke(tmp_path, "--tp", 8, "--shard", f"{rule}=-1")
    assert "not divisible by 3: 2 tensors" in invoke(tmp_path, "--tp", 3, "--shard", f"{rule}=0")
    assert "whole" not in invoke(tmp_path)  # on one rank nothing could be cut


def test_values_without_a_file_of_their_own(tmp_path: Path) -> None:
    save_on(1, lambda comm: {"w": rows("w", torch.ones(3), comm)}, tmp_path / "c", "tensorstore")
    ts = pytest.importorskip("tensorstore")
    # TensorStore keeps values of at most 100 bytes in the nodes of the tree.
    database = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path / 'c'}/"}).result()
    for key in database.list().result():
        database.write(key, database.read(key).result().value).result()
    assert planned(tmp_path / "c")["files"] == []
    text = invoke(tmp_path / "c")
    assert "0 opened" not in text
    assert "files      no other: the values lie with what describes the checkpoint" in text
    assert "2 opened, " in invoke(saved(tmp_path / "d", "tensorstore"))


def test_a_recipe_is_planned_and_shown(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", ("tensorstore", 1), 256)
    recipe = tmp_path / "rules.json"
    rules = [
        {"split": QKV, "into": ["q_proj.weight", "k_proj.weight"]},
        {"transpose": "{x}_proj.weight"},
        {"drop": "norm.weight"},
    ]
    recipe.write_text(json.dumps(rules))
    plan = planned(folder, "--tp", 2, "--recipe", recipe)
    assert plan["findings"] == []
    assert plan["recipe"]["left_out"] == [NORM]
    assert plan["recipe"]["tensors"] == {"q_proj.weight": QKV, "k_proj.weight": QKV}
    cuts = {cut["key"]: cut["axis"] for cut in plan["cuts"]}
    assert cuts == {PROJ: 1, "q_proj.weight": 0, "k_proj.weight": 0}
    output = invoke(folder, "--recipe", recipe)
    assert f"q_proj.weight  float32[256, 128] <- {QKV}" in output
    assert f"left out: {NORM}" in output
