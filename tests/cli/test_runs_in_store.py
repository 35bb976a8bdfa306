"""``dckpt`` on a run in an object store: the same as of one on a disk, in few requests."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dist_checkpointing import CheckpointManager, save
from dist_checkpointing.filesystem import Holder, Kind, ObjectPath
from dist_checkpointing.format import StoreAttempt
from dist_checkpointing.tools import ls as following
from faults import commits_waiting, counted_requests
from samples import Run
from states import at_step, trained
from stores import data_url, new_url, put


def run_of(*steps: int, url: str | None = None) -> str:
    url = new_url() if url is None else url
    with CheckpointManager(url) as manager:
        for step in steps:
            manager.save(step, trained(step))
    return url


def test_a_run_is_listed_as_on_a_disk(dckpt: Run, tmp_path: Path) -> None:
    url, folder = run_of(10, 20), run_of(10, 20, url=str(tmp_path / "run"))
    CheckpointManager(url).verify(10)
    CheckpointManager(folder).verify(10)
    of_store, of_disk = (dckpt("ls", place, "--json").json for place in (url, folder))
    assert (of_store["path"], of_store["latest"], of_store["remark"]) == (url, "20", None)

    def facts(document: dict[str, Any]) -> list[tuple[Any, ...]]:
        names = ("step", "state", "shared_with", "notes", "num_bytes_shared")
        return [tuple(row[name] for name in names) for row in document["steps"]]

    assert facts(of_store) == facts(of_disk)
    for row in of_store["steps"]:
        place = ObjectPath.of(row["path"])
        objects = place.store.list_below(place.prefix)
        assert row["num_bytes"] == sum(info.num_bytes for info in objects)
        assert abs(time.time() - row["saved_at"]) < 600
    printed = dckpt("ls", url)
    assert (printed.code, printed.err) == (0, "")
    assert printed.out.splitlines()[0] == url
    assert printed.out.splitlines()[-1].endswith("latest 20")


def test_a_run_of_many_steps_is_listed_at_once(dckpt: Run) -> None:
    def requests(url: str) -> tuple[int, int]:
        with counted_requests() as counts:
            assert dckpt("ls", url).code == 0
        return counts["list"], counts.total()

    few, many = requests(run_of(1)), requests(run_of(*range(11)))
    assert few[0] == many[0] == 1
    assert many[1] - few[1] <= 10 * 4  # the list of its commits, the commit, its seal


def test_a_step_is_named_in_a_store(dckpt: Run) -> None:
    url = run_of(10, 20)
    for name, step in (("latest", 20), ("10", 10), ("00000020", 20)):
        assert dckpt("show", f"{url}@{name}", "step", "--json").json["value"] == step
    assert dckpt("ls", f"{url}@latest").out == dckpt("ls", f"{url}/step-00000020").out
    assert dckpt("diff", f"{url}@10", f"{url}@latest").code == 1
    for name, words in (
        (f"{url}@30", "no such step"),
        (f"{new_url()}@latest", "no steps of a run are here"),
        (url, f"it is a run with 2 steps; file {url}. dckpt ls {url} lists them"),
    ):
        ended = dckpt("stats", name)
        assert ended.code == 2
        assert words in ended.err


def test_every_state_of_a_step(dckpt: Run) -> None:
    url = run_of(*range(1, 4))
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
    found = {row["step"]: row["state"] for row in dckpt("ls", url, "--json").json["steps"]}
    assert found == {
        "1": "whole",
        "2": "damaged",
        "3": "whole",
        "4": "unfinished",
        "5": "being saved",
        "6": "unfinished",
        "7": "no checkpoint",
        "8": "unfinished",
    }
    held.abandon()


def test_a_folder_of_a_store_that_is_no_run(dckpt: Run) -> None:
    url = new_url()
    put(url, "1/notes.txt", b"mine")
    ended = dckpt("ls", url)
    assert ended.code == 2
    assert "is not a distributed checkpoint" in ended.err


def test_following_a_save_into_a_store(dckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    url = run_of(1)
    may_commit, looks, more_looks = threading.Event(), iter(range(3)), iter(range(3))

    def pause() -> None:
        time.sleep(0.01)
        if next(looks, None) is None:
            may_commit.set()
            if not saver.is_alive() and next(more_looks, None) is None:
                raise KeyboardInterrupt

    monkeypatch.setattr(following, "_pause", pause)
    step = f"{url}/step-00000002"
    claims = ObjectPath.of(step) / ".dckpt/claims"
    saver = threading.Thread(target=save, args=(at_step(2), step))
    with commits_waiting(may_commit):
        saver.start()
        while not claims.store.list_folder(claims.prefix)[1]:
            assert saver.is_alive()
        followed = dckpt("ls", url, "--follow")
        saver.join()
    assert (followed.code, followed.err) == (130, "")
    title, begun, ended = followed.out.splitlines()[-3:]
    assert title == f"{url}: waiting for saves; Ctrl-C ends"
    assert begun.startswith(f"2: being saved by process {os.getpid()} on {os.uname().nodename}")
    assert ended.startswith("2: whole, ")
    assert ", saved in " in ended
    assert dckpt("ls", f"{url}@2", "--follow").out.startswith("step-00000002: whole, ")
