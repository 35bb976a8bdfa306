"""Checkpoints in object stores are read: load, slices, verify, errors, requests and memory."""

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import dist_checkpointing as dc
from damage import files_in
from dist_checkpointing.checkpoint import examine_checkpoint
from dist_checkpointing.filesystem import ObjectPath, ObjectStoreOptions
from dist_checkpointing.interop import DCPReader
from dist_checkpointing.storage import StorageOptions
from dist_checkpointing.strategies import TensorStoreLoadShardedStrategy
from dist_checkpointing.testing import assert_same_bits
from faults import counted_requests, store_requests
from s3_proxy import Fault, Proxy, proxy_before
from s3_servers import Server, moto_server
from samples import GOLDEN_NAMES, METADATA, RANKS, Sample, Samples
from states import blanks, rows, save_on, shard
from stores import copied_up, damage, data_names, data_url, new_url, put


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with moto_server() as server, proxy_before(server.endpoint) as proxy:
        yield proxy


def over_http(proxy: Proxy, url: str) -> ObjectPath:
    options = Server(proxy.url).place().store.options
    return ObjectPath.of(url, replace(options, max_retries=1, retry_timeout=5.0))


def assert_reads(sample: Sample, place: Any) -> None:
    """All that reads a checkpoint finds the sample there."""
    sample.assert_is(dc.load(sample.template(), place, verify=True))
    plain = dc.load_plain_tensors(place)
    opened = dc.Checkpoint.open(place)
    for key, tensor in sample.tensors.items():
        assert_same_bits(plain[key], tensor, key)
        if tensor.ndim:
            assert_same_bits(opened[key][1:, ...], tensor[1:], key)
            assert_same_bits(opened[key][..., ::2], tensor[..., ::2], key)
    assert [*opened.objects["rng"]] == [(rank,) for rank in range(RANKS)]
    assert opened.objects["rng"][1] == {"seed": [1, 5]}
    assert dc.load_common_state_dict(place)["iteration"] == 1000
    assert dc.load_content_metadata(place) == opened.metadata == METADATA
    assert dc.load_tensors_metadata(place).keys() == sample.tensors.keys()
    assert dc.load_sharded_metadata(place).keys() > sample.tensors.keys()
    assert opened.fingerprints() == dc.Checkpoint.open(sample.folder).fingerprints()
    found = examine_checkpoint(place)
    assert (found.findings, found.refused, found.is_sealed) == ([], [], True)
    dc.verify_checkpoint(place)


def test_everything_is_read_as_from_a_disk(sample: Sample) -> None:
    url = copied_up(sample.folder, new_url())
    for place in (url, data_url(url)):  # a plain copy of a folder is a checkpoint too
        assert_reads(sample, place)


def test_a_checkpoint_in_use_can_be_sent_to_another_process(samples: Samples, proxy: Proxy) -> None:
    sample = samples("tensorstore")
    opened = dc.Checkpoint.open(copied_up(sample.folder, over_http(proxy, new_url("s3"))))
    full = sample.tensors["decoder.weight"]
    assert torch.equal(opened["decoder.weight"][2:], full[2:])
    assert torch.equal(pickle.loads(pickle.dumps(opened))["decoder.weight"][:, 3], full[:, 3])


CHANGES: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda _: None,
    "short": lambda data: data[: len(data) // 3],
    "flipped": lambda data: bytes(byte ^ 64 for byte in data),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_object_is_named(sample: Sample, change: str) -> None:
    url = copied_up(sample.folder, new_url())
    hurt = [damage(url, name, CHANGES[change]) for name in data_names(sample)]
    assert hurt
    with pytest.raises(dc.CorruptCheckpointError) as caught:
        dc.load(blanks(sample.tensors), url, verify=change == "flipped")
    paths = [str(finding.path) for finding in caught.value.findings]
    assert paths
    assert all(any(path.startswith(place) for place in hurt) for path in paths)
    with pytest.raises(dc.CorruptCheckpointError) as caught:
        dc.verify_checkpoint(url)
    assert hurt[0] in {str(f.path).split(",")[0] for f in caught.value.findings}


@pytest.mark.parametrize(
    "lost", ["manifest.ocdbt", "d/*", "common.pt", ".dckpt/seal.json", "metadata.json"]
)
def test_what_describes_a_checkpoint_is_missed(samples: Samples, lost: str) -> None:
    sample = samples("tensorstore")
    url = copied_up(sample.folder, new_url())
    for path in sample.folder.glob(lost):
        damage(url, path.relative_to(sample.folder).as_posix(), CHANGES["gone"])
    error = dc.CheckpointNotFoundError if lost == "metadata.json" else dc.CorruptCheckpointError
    with pytest.raises(error, match=url):
        dc.load(sample.template(), url, verify=True)


def test_states_without_a_commit_are_no_checkpoints(samples: Samples) -> None:
    folder, url = samples("tensorstore").folder, new_url()
    with pytest.raises(dc.CheckpointNotFoundError, match="does not exist"):
        dc.Checkpoint.open(url)
    put(url, ".dckpt/claims/1.json", b"{}")
    with pytest.raises(dc.CheckpointNotFoundError, match="begun here and never committed"):
        dc.Checkpoint.open(url)
    copied_up(folder, url)
    assert dc.Checkpoint.open(url).is_committed
    # A later save that was ended by another one changes nothing.
    put(url, ".dckpt/commits/2.json", b'{"ended_by": "another"}')
    opened = dc.Checkpoint.open(url)
    assert opened.is_committed
    put(url, ".dckpt/commits/10.json", b'{"attempt": "../../secret"}')
    with pytest.raises(dc.CorruptCheckpointError, match="no name of a save"):
        dc.Checkpoint.open(url)
    put(url, ".dckpt/commits/10.json", b"{")
    with pytest.raises(dc.CorruptCheckpointError, match=f"{url}/.dckpt/commits/10.json"):
        dc.load({}, url)
    place = ObjectPath.of(url)
    place.store.delete([(place / ".dckpt/commits/10.json").key, (place / "metadata.json").key])
    assert not dc.check_is_distributed_checkpoint(url)
    assert [opened.is_committed] == [False]
    with pytest.raises(dc.CheckpointNotFoundError, match="never committed"):
        dc.load({}, url)
    with pytest.raises(dc.CorruptCheckpointError, match="not the checkpoint that was opened"):
        opened.require_unchanged()


def test_a_store_that_is_down_is_no_damage(samples: Samples, proxy: Proxy) -> None:
    place = over_http(proxy, new_url("s3"))
    sample = samples("tensorstore")
    copied_up(sample.folder, place)
    opened = dc.Checkpoint.open(place)
    _ = opened.index
    proxy.fault = lambda _method, _path: Fault(status=503)
    try:
        for read in (lambda: opened["decoder.weight"][:], lambda: dc.verify_checkpoint(place)):
            with pytest.raises((OSError, dc.RankFailedError), match=r"503(.|\n)*" + place.key):
                read()
        with pytest.raises(dc.RankFailedError, match=r"503(.|\n)*" + place.key):
            dc.load(sample.template(), place)
    finally:
        proxy.fault = lambda _method, _path: None


@pytest.mark.parametrize(
    ("backend", "count", "most_requests"),
    [("tensorstore", 1000, 60), ("torch_dist", 1000, 60), ("tensorstore", 5000, 15)],
)
def test_small_tensors_share_requests(
    tmp_path: Path, backend: str, count: int, most_requests: int
) -> None:
    """Of thousands of numbers, all that is read is the tree of the database."""
    shape, world_size = ((100,), 2) if count == 1000 else ((), 1)
    full = {f"layers.{i:05d}.a.rather.long.key": torch.full(shape, float(i)) for i in range(count)}
    parts = rows if shape else lambda key, tensor, _: shard(key, tensor)
    save_on(
        world_size, lambda c: {k: parts(k, t, c) for k, t in full.items()}, tmp_path / "c", backend
    )
    url = copied_up(tmp_path / "c", new_url())
    wanted = blanks(full)
    with counted_requests() as counts:
        dc.load(wanted, url)
    assert all(torch.equal(wanted[key].data, tensor) for key, tensor in full.items())
    assert counts.total() <= most_requests, counts
    opened = dc.Checkpoint.open(url)
    one, other = [*full][:2]
    _ = opened[one][...]
    with counted_requests() as counts:
        assert torch.equal(opened[other][...], full[other])
    assert counts.total() <= 2, counts


def test_large_reads_are_cut_and_stay_within_the_buffers(tmp_path: Path) -> None:
    full = {f"w{i}": torch.randn(512, 1024) for i in range(4)}  # 2 MiB each
    url = new_url()
    dc.save({key: shard(key, tensor) for key, tensor in full.items()}, tmp_path / "c")
    copied_up(tmp_path / "c", url)
    place = ObjectPath.of(url, ObjectStoreOptions(part_bytes=2**18, parallelism=16))
    lock, held, most, largest = threading.Lock(), [0], [0], [0]

    def noting(name: str, _: str, go: Any) -> Any:
        if name != "get_range":
            return go()
        begin, end = go.keywords["options"]["range"]
        with lock:
            held[0] += end - begin
            most[0], largest[0] = max(most[0], held[0]), max(largest[0], end - begin)
        try:
            time.sleep(0.002)  # so that others are under way meanwhile
            return go()
        finally:
            with lock:
                held[0] -= end - begin

    buffer_bytes = 2**20
    options = StorageOptions(buffer_bytes=buffer_bytes)
    strategy = TensorStoreLoadShardedStrategy(options=options)
    with store_requests(noting):
        wanted = {key: shard(key, torch.zeros(512, 256), (1, 1, 4)) for key in full}
        dc.load(wanted, place, strategy)
        for key, tensor in full.items():
            data = wanted[key].data
            assert data is not None
            assert torch.equal(data, tensor[:, 256:512])
        whole = blanks(full)
        dc.load(whole, place, strategy)
        assert all(torch.equal(whole[key].data, tensor) for key, tensor in full.items())
    assert 2**17 < largest[0] <= 2**18
    assert most[0] <= buffer_bytes


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_loads_from_a_store(samples: Samples) -> None:
    url = copied_up(samples("tensorstore").folder, new_url())
    full = samples("tensorstore").tensors["decoder.weight"]
    state = {"decoder.weight": torch.zeros_like(full)}
    dcp_load(state, storage_reader=DCPReader("elsewhere"), checkpoint_id=url, no_dist=True)
    assert torch.equal(state["decoder.weight"], full)
    assert DCPReader.validate_checkpoint_id(url)
    assert not DCPReader.validate_checkpoint_id(new_url())
    assert not DCPReader.validate_checkpoint_id("ftp://bucket/x")


@pytest.mark.parametrize("name", ["dcp", *GOLDEN_NAMES])
def test_checkpoints_of_other_programs_are_read_from_a_store(samples: Samples, name: str) -> None:
    sample, url = samples(name), new_url()
    for file, content in files_in(sample.folder).items():
        put(url, file, content)
    plain, opened = dc.load_plain_tensors(url), dc.Checkpoint.open(url)
    for key, tensor in sample.tensors.items():
        assert_same_bits(plain[key], tensor, key)
        assert_same_bits(opened[key][...], tensor, key)
    assert opened.common.keys() == dc.Checkpoint.open(sample.folder).common.keys()
    dc.verify_checkpoint(url)
