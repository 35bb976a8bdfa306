"""One rank of tests/distributed/test_peer_copies.py: two ranks are a machine with a folder.

Usage: peer_copies_rank.py SCENARIO URL ENDPOINT FOLDERS MACHINES REPORTS
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_checkpointing import CheckpointManager, ObjectPath, ObjectStoreOptions, Place
from dist_checkpointing.comm import default_comm
from faults import store_requests
from s3_servers import Server
from states import rows

STEPS = (10, 20)


def state_of(value: float) -> dict[str, Any]:
    full = torch.full((24, 1000), float(value))
    return {"rows": rows("rows", full, default_comm()), "value": value}


def files_of_values(folder: Path, step: int) -> set[str]:
    root = folder / f"step-{step:08d}"
    return {str(path.relative_to(root)) for path in (root / "data/model").rglob("*")}


def main() -> None:
    scenario, url, endpoint, folders, names, reports = sys.argv[1:]
    machines = names.split(",")
    rank = int(os.environ["RANK"])
    machine = machines[rank // 2]
    os.environ["DIST_CHECKPOINTING_MACHINE"] = machine
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    root = ObjectPath.of(url, Server(endpoint).place().store.options)
    assert isinstance(root.store.options, ObjectStoreOptions)
    disks = {name: Path(folders) / name for name in machines}
    places = [Place(disks[machine], copies=1), Place(root)]
    read: list[str] = []

    def act(name: str, key: str, go: Any) -> Any:
        if "/data/model/" in key:
            if name in ("get", "get_range"):
                read.append(key)
            if scenario == "killed" and name.startswith("put") and "step-00000020" in key:
                raise OSError("the store does not answer")
        return go()

    with store_requests(act):
        manager = CheckpointManager(places)
        if scenario == "load":
            loaded = manager.load(state_of(0))
            assert set(loaded["rows"].unique().tolist()) == {loaded["value"]}
            report = {"value": loaded["value"], "read": read.copy()}
            manager.close()
        else:
            for step in STEPS:
                manager.async_save(step, state_of(step))
            manager.wait()
            if scenario == "killed":
                following = disks[machines[(rank // 2 + 1) % len(machines)]]
                while not files_of_values(disks[machine], 20) & files_of_values(following, 20):
                    time.sleep(0.05)
                time.sleep(3)  # behind the training, also what the others have
                os.kill(os.getpid(), signal.SIGKILL)
            manager.close()
            report = {"value": STEPS[-1], "read": []}
    (Path(reports) / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
