"""Other tools read what a save has put into an object store, and every dtype comes back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from zarr.storage import ObjectStore as ZarrStore

from dist_checkpointing import ShardedTensor, save
from dist_checkpointing.filesystem import ObjectPath
from dist_checkpointing.format import data_folder
from dist_checkpointing.testing import run_ranks

WEIGHT = torch.arange(24.0).reshape(6, 4)


def saved(place: ObjectPath, backend: str) -> ObjectPath:
    """The folder of the data of a checkpoint that four ranks have saved."""

    def part(rank: int) -> dict[str, Any]:
        row, column = divmod(rank, 2)
        own = WEIGHT.chunk(2)[row].chunk(2, 1)[column]
        leaf = ShardedTensor.from_rank_offsets("layer.weight", own, (0, row, 2), (1, column, 2))
        return {"layer": leaf, "step": 3}

    run_ranks(4, lambda comm: save(part(comm.rank), place, backend, comm=comm))
    folder = data_folder(place)
    assert isinstance(folder, ObjectPath)
    return folder


def s3_kvstore(folder: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    options = folder.store.options
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(options.access_key_id))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(options.secret_access_key))
    return {
        "driver": "s3",
        "bucket": "checkpoints",
        "endpoint": options.endpoint,
        "aws_region": options.region,
        "path": folder.prefix,
    }


@pytest.mark.parametrize("backend", ["tensorstore", "zarr"])
def test_tensorstore_opens_a_tensor(
    backend: str, s3_place: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = s3_kvstore(saved(s3_place, backend), monkeypatch)
    kvstore = {"driver": "ocdbt", "base": base, "path": "layer.weight/"}
    if backend == "zarr":
        kvstore = base | {"path": f"{base['path']}layer.weight/"}
    array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
    np.testing.assert_array_equal(array.read().result(), WEIGHT.numpy())


def test_zarr_opens_the_checkpoint(s3_place: ObjectPath) -> None:
    import obstore

    folder = saved(s3_place, "zarr")
    options = folder.store.options
    client = obstore.store.S3Store(
        "checkpoints",
        prefix=folder.key,
        endpoint=options.endpoint,
        region=options.region,
        access_key_id=options.access_key_id,
        secret_access_key=options.secret_access_key,
        client_options={"allow_http": True},
    )
    group = zarr.open_group(ZarrStore(client, read_only=True), mode="r")
    np.testing.assert_array_equal(group["layer.weight"][:], WEIGHT.numpy())  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_reads_a_downloaded_checkpoint(s3_place: ObjectPath, tmp_path: Path) -> None:
    folder = saved(s3_place, "torch_dist")
    for info in folder.store.list_below(folder.prefix):
        path = tmp_path / info.key.removeprefix(folder.prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(folder.store.get(info.key))
    target = {"layer.weight": torch.zeros(6, 4)}
    load_by_dcp(target, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(target["layer.weight"], WEIGHT)
