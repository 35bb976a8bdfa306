"""Saves into object stores: what is put, what a reader finds, and what a failed save leaves."""

import os
import re
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any
from urllib.request import urlopen

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.filesystem import ObjectPath, ObjectStoreOptions, file_writer
from dist_checkpointing.format import data_folder, read_seal, remove_checkpoint
from faults import store_requests
from s3_proxy import Fault, proxy_before
from states import blanks, wholes
from stores import new_url

BIG = torch.randn(3000, 1024, generator=torch.Generator().manual_seed(1))


def big_state(*, empty: bool = False) -> dict[str, Any]:
    """12 MiB in one tensor, of which a part is strided, and small values."""
    big = torch.zeros_like(BIG) if empty else BIG
    return {
        "big": dc.ShardedTensor.from_rank_offsets("big", big),
        "turned": dc.ShardedTensor.from_rank_offsets("turned", big[:2000].clone().T),
        "small": [
            dc.ShardedTensor.from_rank_offsets(f"small.{n}", big[n].clone()) for n in range(20)
        ],
        "object": dc.ShardedObject("object", None if empty else {"seed": 7}, (1,), (0,)),
        "step": 0 if empty else 1000,
    }


def require_big(loaded: dict[str, Any]) -> None:
    assert torch.equal(loaded["big"], BIG)
    assert torch.equal(loaded["turned"], BIG[:2000].T)
    assert all(torch.equal(loaded["small"][n], BIG[n]) for n in range(20))
    assert (loaded["object"], loaded["step"]) == ({"seed": 7}, 1000)


def keys_below(place: ObjectPath) -> list[str]:
    return [info.key.removeprefix(place.prefix) for info in place.store.list_below(place.prefix)]


def unfinished_uploads(place: ObjectPath) -> int:
    """Multipart uploads that the simulated server still holds."""
    with urlopen(f"{place.store.options.endpoint}/checkpoints?uploads") as answer:
        listed = answer.read().decode()
    return sum(key.startswith(place.prefix) for key in re.findall("<Key>(.*?)</Key>", listed))


@pytest.mark.parametrize("backend", ["tensorstore", "zarr", "torch_dist"])
def test_a_checkpoint_is_sealed_unlisted_and_comes_back_also_from_a_copy_on_a_disk(
    s3_place: ObjectPath, tmp_path: Path, backend: str
) -> None:
    """The store answers for every put: a save neither lists its own files nor reads them again."""
    asked: list[tuple[str, str]] = []

    def noting(name: str, key: str, go: Callable[[], Any]) -> Any:
        if not name.startswith(("put", "delete")):
            asked.append((name, key))
        return go()

    with store_requests(noting):
        dc.save(big_state(), s3_place, backend)
    assert unfinished_uploads(s3_place) == 0
    folder = data_folder(s3_place)
    assert isinstance(folder, ObjectPath)
    of_data = [(name, key) for name, key in asked if key.startswith(folder.key)]
    names = {key.removeprefix(folder.prefix) for _, key in of_data}
    assert names <= {".dckpt/attempt.json", ".dckpt/seal.json"}
    seal = read_seal(folder)
    assert seal is not None
    assert sorted([*seal.files, ".dckpt/seal.json", "metadata.json"]) == keys_below(folder)
    etags = {info.key: info.etag for info in folder.store.list_below(folder.prefix)}
    of_tensors = [file for file in seal.files.values() if file.digest is None]
    assert of_tensors
    assert all(file.etag == etags[(folder / file.name).key] for file in of_tensors)
    for name in keys_below(folder):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(folder.store.get((folder / name).key))
    for place in (s3_place, tmp_path):
        require_big(dc.load(big_state(empty=True), place, verify=True))
        dc.verify_checkpoint(place)


def test_large_objects_are_cut() -> None:
    place, seen = ObjectPath.of(new_url()), list[int]()
    big = {f"w{n}": torch.full((2**26,), n, dtype=torch.int8) for n in range(5)}
    dc.save(wholes(big), place, progress=lambda state: seen.append(state.bytes_done))
    assert max(seen) >= 5 * 2**26
    sizes = [
        info.num_bytes
        for info in place.store.list_below(place.prefix)
        if "/data/model/" in info.key
    ]
    assert len(sizes) > 2
    loaded = dc.load(blanks(big), place, verify=True)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in big.items())
    remove_checkpoint(place)


def test_as_many_chunks_are_put_at_a_time_as_the_store_allows() -> None:
    """Each waits for fifteen others."""
    options = ObjectStoreOptions(parallelism=16)
    place, others = ObjectPath.of(new_url(), options), Barrier(16, timeout=30)

    def wait(name: str, key: str, go: Callable[[], Any]) -> Any:
        if name == "put" and key.endswith("/c.0.0"):
            others.wait()
        return go()

    tensors = {f"w{n}": torch.full((4, 4), float(n)) for n in range(32)}
    with store_requests(wait):
        dc.save(wholes(tensors), place, "zarr")
    loaded = dc.load(blanks(tensors), place, verify=True)
    assert all(torch.equal(loaded[key], w) for key, w in tensors.items())


@pytest.mark.parametrize(
    ("backend", "parallelism"),
    [("tensorstore", 16), ("tensorstore", 1), ("zarr", 1), ("torch_dist", 16)],
)
def test_an_upload_that_fails_in_the_middle_ends_the_save(
    s3_place: ObjectPath, backend: str, parallelism: int
) -> None:
    """While the next parts wait, and no thread waits for ever."""
    assert s3_place.store.options.endpoint is not None
    with proxy_before(s3_place.store.options.endpoint) as proxy:
        proxy.fault = lambda _, path: (
            Fault(status=503) if "partNumber=2" in path or "partNumber=3" in path else None
        )
        options = replace(
            s3_place.store.options,
            endpoint=proxy.url,
            max_retries=0,
            part_bytes=5 * 2**20,
            parallelism=parallelism,
        )
        place = ObjectPath(replace(s3_place.store, options=options), s3_place.key)
        big = torch.zeros(2**23)
        # Of parts that come while the upload is aborted moto makes a 500.
        with pytest.raises(dc.RankFailedError, match=rf"(?s)50[03].*{s3_place.key}/data/"):
            dc.save(wholes({f"w{n}": big for n in range(3)}), place, backend)
    if parallelism == 1:
        assert unfinished_uploads(s3_place) == 0


@pytest.mark.parametrize("backend", ["tensorstore", "zarr", "torch_dist"])
def test_a_save_that_is_cancelled_stops_and_aborts_its_uploads(
    s3_place: ObjectPath, backend: str
) -> None:
    assert s3_place.store.options.endpoint is not None
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    with proxy_before(s3_place.store.options.endpoint) as proxy:
        parts: list[str] = []

        def interrupt(method: str, path: str) -> Fault | None:
            if method == "PUT" and "partNumber" in path:
                parts.append(path)
                if len(parts) == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                return Fault(forwards=True, seconds=0.2)
            return None

        proxy.fault = interrupt
        options = replace(s3_place.store.options, endpoint=proxy.url, parallelism=1)
        place = ObjectPath(replace(s3_place.store, options=options), s3_place.key)
        try:
            with pytest.raises(KeyboardInterrupt):
                dc.save(wholes({f"w{n}": BIG for n in range(20)}), place, backend)
        finally:
            signal.signal(signal.SIGINT, old)
        assert len(parts) < 20
    assert unfinished_uploads(s3_place) == 0
    with pytest.raises(dc.CheckpointNotFoundError):
        dc.load({}, s3_place)


def test_a_chunk_that_is_cancelled_aborts_its_upload(
    s3_place: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        while not unfinished_uploads(s3_place):
            time.sleep(0.01)
        raise KeyboardInterrupt

    create = file_writer.create

    def created(*args: Any, **options: Any) -> Any:
        file = create(*args, **options)
        monkeypatch.setattr(file, "close", interrupted)
        return file

    monkeypatch.setattr(file_writer, "create", created)
    with pytest.raises(KeyboardInterrupt):
        file_writer.put(s3_place, "chunk", bytes(3 * s3_place.store.options.part_bytes))
    assert unfinished_uploads(s3_place) == 0
    assert keys_below(s3_place) == []


def every(place: ObjectPath) -> list[str]:
    """The keys of a bucket."""
    return [info.key for info in place.store.list_below("")]


@pytest.mark.parametrize("name", ["a//b", "a/./b/", "with space", "100%41", "ü+&=?#[x]", "", "/"])
def test_a_place_of_any_name(name: str) -> None:
    url = f"memory://{uuid.uuid4().hex}/{name}"
    dc.save({"step": 1}, url)
    dc.save({"step": 2}, url, overwrite=True)
    assert dc.load({}, url)["step"] == 2
    place = ObjectPath.of(url)
    parts = [part for part in name.split("/") if part not in ("", ".")]
    assert place.key == "/".join(parts)
    assert len(every(place)) == len(keys_below(place))  # nothing is anywhere else
    with dc.CheckpointManager(f"{url}/run") as manager:
        manager.save(1, {"step": 1})
        assert manager.steps() == [1]


@pytest.mark.parametrize("name", ["../x", "a/../b", "..", "line\nbreak", "delete\x7f"])
def test_a_place_that_no_object_can_be_called(name: str) -> None:
    with pytest.raises(dc.CheckpointingException, match="not a path of a checkpoint") as caught:
        dc.save({"step": 1}, f"memory://bucket/{name}")
    assert repr(name)[1:-1] in str(caught.value)


def test_what_is_for_disks_only_is_refused(tmp_path: Path) -> None:
    dc.save(big_state(), tmp_path / "base")
    url = new_url()
    with pytest.raises(dc.UnsupportedFormatError, match="mounted file system only"):
        dc.save(big_state(), url, ("zarr", 1))
    assert keys_below(ObjectPath.of(url)) == []
    with pytest.raises(dc.UnsupportedFormatError, match="an incremental save works") as caught:
        dc.save(big_state(), url, base=tmp_path / "base")
    assert "backend tensorstore" not in str(caught.value)
    dc.save(big_state(), url)
    with pytest.raises(dc.UnsupportedFormatError, match="object store"):
        dc.save(big_state(), tmp_path / "next", base=url)
