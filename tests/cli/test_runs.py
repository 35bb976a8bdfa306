"""``dckpt`` on the folder of a run, and on folders that are no checkpoints."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import CheckpointManager, save
from dist_checkpointing.filesystem import FolderLock, Holder, Kind, ObjectPath
from dist_checkpointing.format import StoreAttempt
from dist_checkpointing.manager import Retention
from faults import counted_requests
from samples import Run, Samples
from states import at_step, trained, wholes
from stores import data_url, new_url, put


def managed(root: Any, *steps: int, **options: Any) -> Any:
    with CheckpointManager(root, **options) as manager:
        for step in steps:
            manager.save(step, trained(step))
    return root


def of_megatron(root: Path, pointer: str = "200") -> Path:
    for step in (100, 200):
        save(at_step(step), root / f"iter_{step:07d}", ("torch_dist", 1))
    (root / "latest_checkpointed_iteration.txt").write_text(f"{pointer}\n")
    return root


def listed(dckpt: Run, root: object) -> dict[str, dict[str, Any]]:
    return {row["step"]: row for row in dckpt("ls", root, "--json").json["steps"]}


def states(dckpt: Run, root: object) -> dict[str, str]:
    return {step: row["state"] for step, row in listed(dckpt, root).items()}


def test_the_steps_of_a_run_of_ours_on_a_disk_and_in_a_store(tmp_path: Path, dckpt: Run) -> None:
    found = []
    for root in (tmp_path / "run", new_url()):
        managed(root, 10, 20, 30)
        CheckpointManager(root).verify(10)
        finished = dckpt("ls", root, code=0, err="")
        title, header, *rows = finished.out.partition("\n\n")[0].split("\n")
        assert title == str(root)
        assert header.split() == ["STEP", "STATE", "AGE", "SIZE", "OWN", "NOTES"]
        assert [row.split()[:2] for row in rows] == [[step, "whole"] for step in ("10", "20", "30")]
        assert [row.endswith("latest") for row in rows] == [False, False, True]
        assert "3 steps" in finished.out.splitlines()[-1]
        document = dckpt("ls", root, "--json").json
        head = (document["path"], document["latest"], document["remark"])
        assert head == (str(root), "30", None)
        for row in document["steps"]:
            assert row["num_bytes"] == bytes_below(row["path"])
            assert abs(time.time() - row["saved_at"]) < 600
        names = ("step", "state", "shared_with", "notes", "num_bytes_shared")
        found.append([tuple(row[name] for name in names) for row in document["steps"]])
    assert found[0] == found[1]


def bytes_below(place: str) -> int:
    if "://" not in place:
        return sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file())
    folder = ObjectPath.of(place)
    return sum(info.num_bytes for info in folder.store.list_below(folder.prefix))


def test_the_steps_of_a_run_of_megatron(tmp_path: Path, dckpt: Run) -> None:
    root = of_megatron(tmp_path / "run", pointer="100")
    pointer = root / "latest_checkpointed_iteration.txt"
    document = dckpt("ls", root, "--json").json
    assert [row["step"] for row in document["steps"]] == ["100", "200"]
    # Not the newest: Megatron loads what its pointer names.
    assert document["latest"] == "100"
    pointer.write_text("300")
    document = dckpt("ls", root, "--json").json
    assert document["latest"] == "200"
    assert "names '300', which is not a checkpoint here" in document["remark"]
    assert document["remark"] in dckpt("ls", root).out
    pointer.write_text("release")
    save(at_step(7), root / "release", ("torch_dist", 1))
    document = dckpt("ls", root, "--json").json
    steps = [row["step"] for row in document["steps"]]
    assert (steps, document["latest"]) == (["release", "100", "200"], "release")
    assert dckpt("show", f"{root}@latest", "step", "--json").json["value"] == 7


def test_a_step_is_named_wherever_a_checkpoint_is_taken(tmp_path: Path, dckpt: Run) -> None:
    root = of_megatron(tmp_path / "run")
    one, two = f"{root}@100", f"{root}@latest"
    converted = tmp_path / "c"
    for arguments, code in (
        (["ls", one], 0),
        (["stats", one], 0),
        (["verify", one], 0),
        (["diff", one, two], 1),
        (["plan", one], 0),
        (["convert", one, converted, "--to", "zarr"], 0),
        (["ls", one, "--follow"], 0),
        (["rm-prefix", one, "w", "--dry-run"], 0),
    ):
        finished = dckpt(*arguments)
        assert finished.code == code, (arguments, finished.err)
    assert dckpt("show", converted, "step", "--json").json["value"] == 100
    # A folder whose name has an at is that folder.
    save(at_step(1), tmp_path / "a@latest")
    assert dckpt("ls", tmp_path / "a@latest").code == 0


@pytest.mark.parametrize("place", ["disk", "store"])
def test_a_step_by_its_name_or_number(tmp_path: Path, dckpt: Run, place: str) -> None:
    root: Any = tmp_path / "run" if place == "disk" else new_url()
    managed(root, 1, 2, 3)
    for name, step in (("latest", 3), ("2", 2), ("0000001", 1)):
        assert dckpt("show", f"{root}@{name}", "step", "--json").json["value"] == step
    assert dckpt("ls", f"{root}@latest").out == dckpt("ls", f"{root}/step-00000003").out
    assert dckpt("diff", f"{root}@1", f"{root}@latest").code == 1
    nothing = tmp_path / "nothing" if place == "disk" else new_url()
    missing = f"no such step; did you mean '3'?; file {root}. Its last steps: 1, 2, 3."
    for name, words in (
        (f"{root}@30", missing),
        (f"{nothing}@latest", "no steps of a run are here"),
        (root, f"it is a run with 3 steps; file {root}. dckpt ls {root} lists them"),
    ):
        assert words in dckpt("stats", name, code=2, out="").err


def test_what_is_not_whole(tmp_path: Path, dckpt: Run) -> None:
    root = managed(tmp_path / "run", 1, 2, 3, 4)
    (root / "step-00000005").mkdir()
    (root / "step-00000001" / "metadata.json").unlink()
    (root / "step-00000002" / "common.pt").unlink()
    (root / "step-00000004" / ".dckpt" / "seal.json").unlink()
    attempt = root / "step-00000004" / ".dckpt" / "attempt.json"
    attempt.write_text(attempt.read_text().replace('".dckpt/seal.json",', ""))
    found = states(dckpt, root)
    assert [*found.values()] == ["unfinished", "damaged", "whole", "committed", "no checkpoint"]
    with FolderLock.acquire(root / "step-00000001"):
        assert states(dckpt, root)["1"] == "being saved"
        refused = dckpt("ls", f"{root}@1", code=2)
        assert f"it is being saved now, by process {os.getpid()}" in refused.err
        assert f"dckpt ls {root / 'step-00000001'} --follow" in refused.err
    assert "a save was begun here and never committed" in dckpt("ls", f"{root}@1").err
    assert states(dckpt, root)["1"] == "unfinished"


def test_what_is_shared_with_what(tmp_path: Path, dckpt: Run) -> None:
    tensors = {f"w{i}": torch.full((1000,), float(i)) for i in range(4)}
    root = tmp_path / "run"
    save(wholes(tensors), root / "1")
    save(wholes({**tensors, "w3": torch.ones(1000)}), root / "2", base=root / "1")
    save(wholes(tensors), root / "3")
    rows = listed(dckpt, root)
    assert {name: row["shared_with"] for name, row in rows.items()} == {
        "1": ["2"],
        "2": ["1"],
        "3": [],
    }
    assert rows["1"]["num_bytes_shared"] == rows["2"]["num_bytes_shared"] == 16_000
    finished = dckpt("ls", root)
    assert "shares with 1" in finished.out
    inodes = {(s.st_ino, s.st_size) for p in root.rglob("*") if p.is_file() for s in [p.stat()]}
    total = sum(size for _, size in inodes)
    assert f"{total / 1024:.1f} KiB" in finished.out.splitlines()[-1]


def test_what_the_manager_knows(tmp_path: Path, dckpt: Run) -> None:
    root = managed(tmp_path / "run", 1, 2, retention=Retention(drop_optimizer_after=1))
    record = json.loads((root / "manager.json").read_text())
    record["steps"]["2"]["verified"] = True
    (root / "manager.json").write_text(json.dumps(record))
    notes = {step: row["notes"] for step, row in listed(dckpt, root).items()}
    assert notes == {"1": ["without optimizer"], "2": ["verified"]}


@pytest.mark.parametrize("place", ["disk", "store"])
def test_the_steps_of_an_abandoned_branch(tmp_path: Path, dckpt: Run, place: str) -> None:
    root: Any = tmp_path / "run" if place == "disk" else new_url()
    with CheckpointManager(root) as manager:
        for step in (6000, 7000, 8000, 6500):
            if step == 6500:
                manager.load({}, 6000)
            manager.save(step, trained(step))
    document = dckpt("ls", root, "--json").json
    notes = {row["step"]: row["notes"] for row in document["steps"]}
    assert document["latest"] == "6500"
    assert notes == {"6000": [], "6500": [], "7000": ["abandoned"], "8000": ["abandoned"]}
    assert dckpt("ls", root).out.count("  abandoned\n") == 2
    for name, step in (("latest", 6500), ("8000", 8000)):
        assert dckpt("show", f"{root}@{name}", "step", "--json").json["value"] == step


def test_a_run_has_no_tensors(tmp_path: Path, dckpt: Run) -> None:
    root = managed(tmp_path / "run", 1)
    for option in (["w"], ["--tree"], ["--all"], ["--fingerprint"]):
        finished = dckpt("ls", root, *option, code=2, out="")
        assert "is a run: name a step of it" in finished.err


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["_CHECKPOINT_METADATA", "manifest.ocdbt"], "it is an Orbax checkpoint"),
        (["0/_CHECKPOINT_METADATA", "0/default/_METADATA"], "it is an Orbax checkpoint"),
        (["config.json", "pytorch_model.bin"], "it is a Hugging Face model of pickled files"),
        (["config.json"], "it is a Hugging Face folder without weights"),
        (["__0_0.distcp", "__1_0.distcp"], "it is an unfinished save of torch DCP"),
        (["mp_rank_00/model_optim_rng.pt"], "it is Megatron's older format"),
        (["zarr.json"], "it is a zarr or TensorStore database"),
        (["a.pt"], "it is a folder of torch.save files"),
        (["readme.txt"], "metadata.json is missing"),
    ],
)
def test_another_folder_is_named_for_what_it_is(
    tmp_path: Path, dckpt: Run, files: list[str], words: str
) -> None:
    for name in files:
        path = tmp_path / "x" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for command in (["verify"], ["plan"], ["rm-prefix", "w"]):
        finished = dckpt(command[0], tmp_path / "x", *command[1:], code=2)
        assert words in finished.err, command
        assert f"{tmp_path / 'x'} is not a distributed checkpoint" in finished.err


def test_folders_of_runs_and_of_checkpoints(tmp_path: Path, samples: Samples, dckpt: Run) -> None:
    managed(tmp_path / "runs" / "gpt", 1)
    assert "it holds runs: gpt" in dckpt("ls", tmp_path / "runs").err
    shutil.copytree(samples("dcp").folder, tmp_path / "accelerate" / "model_fsdp")
    assert "it holds checkpoints: model_fsdp" in dckpt("ls", tmp_path / "accelerate").err


def test_a_run_without_steps(tmp_path: Path, dckpt: Run) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / "latest_checkpointed_iteration.txt").write_text("0")
    finished = dckpt("ls", root, code=0)
    assert "0 steps, 0 B, none is committed" in finished.out
    assert "it is a run with 0 steps" in dckpt("stats", root).err
    assert "no steps of a run are here" in dckpt("stats", f"{root}@latest").err


def test_folders_of_one_number_are_all_listed(tmp_path: Path, dckpt: Run) -> None:
    for name in ("bert-2", "gpt-2", "gpt-3"):
        save(at_step(1), tmp_path / "models" / name)
    assert [*listed(dckpt, tmp_path / "models")] == ["gpt-2", "2", "3"]
    for name in ("again-2", "again-4", "checkpoint"):  # as in the demo: saved by two ranks
        save(at_step(1), tmp_path / "demo" / name)
    assert [*listed(dckpt, tmp_path / "demo")] == ["again-2", "again-4", "checkpoint"]
    assert dckpt("ls", tmp_path / "demo").out.endswith(", none is numbered\n")
    root = managed(tmp_path / "run", 2, 3)
    save(at_step(1), root / "backup-2")
    (root / "step-7").symlink_to(root / "step-7")  # a link to itself is none
    rows = listed(dckpt, root)
    assert {*rows} == {"2", "3", "backup-2"}
    assert rows["2"]["path"] == str(root / "step-00000002")
    assert rows["backup-2"]["path"] == str(root / "backup-2")
    assert "backup-2" in dckpt("verify", f"{root}@backup-2").out


def test_a_step_of_the_current_folder(
    tmp_path: Path, dckpt: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = managed(tmp_path / "run", 1, 2)
    monkeypatch.chdir(root)
    for name in (".@latest", "@latest", "../run@latest", "step-00000001/..@latest"):
        assert dckpt("stats", name, "--json").json["path"].endswith("step-00000002"), name


# ``dckpt`` on a run in an object store: the same as of one on a disk, in few requests.


def test_a_run_of_many_steps_is_listed_at_once(dckpt: Run) -> None:
    def requests(url: str) -> tuple[int, int]:
        with counted_requests() as counts:
            assert dckpt("ls", url).code == 0
        return counts["list"], counts.total()

    few, many = requests(managed(new_url(), 1)), requests(managed(new_url(), *range(11)))
    assert few[0] == many[0] == 1
    assert many[1] - few[1] <= 10 * 4  # the list of its commits, the commit, its seal


def test_every_state_of_a_step(dckpt: Run) -> None:
    url = managed(new_url(), 1, 2, 3)
    unfinished, saving, silent = (ObjectPath.of(url) / f"step-{n:08d}" for n in (4, 5, 6))
    StoreAttempt.begin(unfinished, ["x"]).release()
    held = StoreAttempt.begin(saving, ["x"])
    StoreAttempt.begin(silent, ["x"])
    # Of another machine, and without a heartbeat for longer than three of its periods.
    mine = Holder.current(Kind.FILE)
    theirs = Holder(mine.token, mine.kind, "elsewhere", "", "", mine.pid, mine.started)
    claim = {"period": 1e-9, "holder": json.loads(theirs.to_json())}
    put(silent, ".dckpt/claims/9.json", json.dumps(claim).encode())
    put(ObjectPath.of(url), "step-00000007/notes.txt", b"mine")
    put(ObjectPath.of(url), "step-00000008/.dckpt/claims/1.json", b"garbage")
    lost = ObjectPath.of(data_url(f"{url}/step-00000002")) / "common.pt"
    lost.store.delete([lost.key])
    found = states(dckpt, url)
    assert [found[n] for n in "123"] == ["whole", "damaged", "whole"]
    assert [found[n] for n in "456"] == ["unfinished", "being saved", "unfinished"]
    assert [found[n] for n in "78"] == ["no checkpoint", "unfinished"]
    held.abandon()


def test_a_folder_of_a_store_that_is_no_run(dckpt: Run) -> None:
    url = new_url()
    put(url, "1/notes.txt", b"mine")
    ended = dckpt("ls", url)
    assert ended.code == 2
    assert "is not a distributed checkpoint" in ended.err
