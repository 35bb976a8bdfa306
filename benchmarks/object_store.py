"""Saves to an object store, and loads from it: ours, DCP on s3fs, and puts and gets alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import torch
from obstore.store import ObjectStore as Client
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from contestants import CHECKED, PLAIN, TENSORSTORE, crc32_switched_off, strategies
from dist_checkpointing import ShardedTensor, load, save
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.filesystem.object_store import ObjectPath, _client
from dist_checkpointing.storage import Checksum, StorageOptions
from runner import SkippedError, Stage, Way
from state import LocalTensor, State, Work, by_key
from world import WayFailedError

RAW, DCP = "obstore", "DCP on s3fs"
OURS, OURS_CHECKED = "tensorstore 1", "tensorstore 1 + checksum"
_STATE = State(32, (2048, 2048))  # 512 MiB
_REQUESTS = 16  # at a time: the default of ObjectStoreOptions
_SERVER = Path(__file__).parents[1] / "tests" / "shared" / "s3_servers.py"


@contextmanager
def store_url(url: str) -> Iterator[str]:
    """The URL itself; for "" that of a server which lives as long as the body."""
    if url:
        yield url
        return
    command = [sys.executable, str(_SERVER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - ours
        try:
            yield _started(server)
        finally:
            server.terminate()


def _started(server: subprocess.Popen[str]) -> str:
    """Take over what the server says of itself: ``export NAME=value`` lines, then its bucket."""
    assert server.stdout is not None
    for line in server.stdout:
        words = line.split()
        if words[0] != "export":
            return words[3]
        name, _, value = words[1].partition("=")
        os.environ[name] = value
    raise SystemExit("--store without a URL starts Ceph, which did not work: see above")


@dataclass(frozen=True, slots=True)
class Calls:
    """One of the ways, ready for a state.

    Attributes:
        save: Write ``work.saved`` below a URL.
        load: Fill ``work.target`` from there, in place.
    """

    save: Callable[[str], object]
    load: Callable[[str], object]


def _raw(work: Work) -> Calls:
    def each(move: Callable[[Client, str, LocalTensor], None], part: Sequence[LocalTensor]) -> Any:
        def run(url: str) -> None:
            folder = ObjectPath.of(url)
            store = folder.store  # its connections are open, as ours are
            client = _client(store.url, store.options, None, os.getpid())
            with ThreadPoolExecutor(_REQUESTS) as pool:
                list(pool.map(lambda t: move(client, (folder / t.key).key, t), part))

        return run

    def put(client: Client, key: str, tensor: LocalTensor) -> None:
        obstore.put(client, key, _bytes_of(tensor), use_multipart=False)

    def get(client: Client, key: str, tensor: LocalTensor) -> None:
        _bytes_of(tensor)[:] = np.frombuffer(memoryview(obstore.get(client, key).bytes()), np.uint8)

    return Calls(each(put, work.saved), each(get, work.target))


def _bytes_of(tensor: LocalTensor) -> Any:
    return tensor.data.view(torch.uint8).numpy().reshape(-1)


def _ours(work: Work, options: StorageOptions) -> Calls:
    save_strategy, load_strategy = strategies(TENSORSTORE, options)
    verify = options.checksum is not Checksum.NONE

    def wrapped(tensors: Sequence[LocalTensor]) -> dict[str, ShardedTensor]:
        return {t.key: ShardedTensor.from_rank_offsets(t.key, t.data) for t in tensors}

    source, target = wrapped(work.saved), wrapped(work.target)
    comm = SingleProcess()
    return Calls(
        lambda url: save(source, url, save_strategy, comm=comm),
        lambda url: load(target, url, load_strategy, comm=comm, verify=verify),
    )


def _dcp(work: Work) -> Calls:
    source, target = by_key(work.saved), by_key(work.target)

    def write(url: str) -> None:
        with crc32_switched_off():
            dcp_save(source, storage_writer=FsspecWriter(url), no_dist=True)

    return Calls(
        write, lambda url: dcp_load(target, storage_reader=FsspecReader(url), no_dist=True)
    )


def open_store(stage: Stage) -> list[Way]:
    """The ways of the case; see ``Case.open``."""
    if not stage.settings.store:
        raise OSError("the case object-store needs --store")
    work = Work.alone(_STATE.at_most(4, 64) if stage.settings.tiny else _STATE)
    return [
        StoreWay(RAW, "raw", f"put and get, {_REQUESTS} at a time", _raw, work, stage),
        StoreWay(OURS, "ours", "no checksums", partial(_ours, options=PLAIN), work, stage),
        StoreWay(OURS_CHECKED, "ours", "verified", partial(_ours, options=CHECKED), work, stage),
        StoreWay(DCP, "dcp", "FsspecWriter, no crc32", _dcp, work, stage),
    ]


class StoreWay(Way):
    """Saves below a new URL in each round, loads it, and deletes it.

    Args:
        name: Name of the way.
        family: Family of the way.
        detail: Its settings.
        open_calls: Makes it ready.
        work: What is saved and loaded.
        stage: Where.
    """

    def __init__(
        self,
        name: str,
        family: str,
        detail: str,
        open_calls: Callable[[Work], Calls],
        work: Work,
        stage: Stage,
    ) -> None:
        self.name, self.family, self.detail = name, family, detail
        self._open, self._work, self._stage = open_calls, work, stage
        self._calls: Calls | None = None

    def warm_up(self) -> Mapping[str, float]:
        is_s3 = self._stage.settings.store.startswith("s3:")
        if self.name == DCP and is_s3 and find_spec("s3fs") is None:
            raise SkippedError("s3fs is not installed")
        self._calls = self._open(self._work)
        self.round()
        return {}

    def round(self) -> Mapping[str, float]:
        assert self._calls is not None
        url = f"{self._stage.settings.store}/{uuid.uuid4().hex}"
        self._work.clear_target()
        gib = self._work.target_bytes / 2**30
        values: dict[str, float] = {}
        try:
            for what, call in (("save", self._calls.save), ("load", self._calls.load)):
                before = time.process_time()
                values[f"{what} s"] = self._stage.world.timed(partial(call, url))
                values[f"{what}, CPU a GiB s"] = (time.process_time() - before) / gib
        finally:
            folder = ObjectPath.of(url)
            folder.store.delete([info.key for info in folder.store.list_below(folder.prefix)])
        if not self._work.target_is_right:
            raise WayFailedError("what it loaded is not what was saved")
        return values
