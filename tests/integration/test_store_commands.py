"""Commands and conversions with checkpoints in object stores."""

import re
from pathlib import Path

import pytest
from obstore.exceptions import GenericError

import dist_checkpointing as dc
from dist_checkpointing.filesystem import object_store
from dist_checkpointing.tools import convert as conversions
from samples import Run, Sample, Samples
from stores import copied_up, new_url, put

convert = conversions.convert


@pytest.mark.parametrize("to", ["tensorstore", "torch_dist", "safetensors"])
def test_a_checkpoint_is_converted_out_of_a_store(
    samples: Samples, to: str, tmp_path: Path
) -> None:
    sample = samples("tensorstore")
    url = copied_up(sample.folder, new_url())
    done = convert(url, tmp_path / "out", to)
    assert done.verified_bytes == sum(tensor.nbytes for tensor in sample.tensors.values())
    if to != "safetensors":
        sample.assert_is(dc.load(sample.template(), tmp_path / "out"))


def test_a_checkpoint_is_converted_into_a_store_and_within_it(samples: Samples) -> None:
    sample, first, second = samples("zarr-2"), new_url(), new_url()
    convert(sample.folder, first)
    convert(first, second)
    sample.assert_is(dc.load(sample.template(), second, verify=True))
    with pytest.raises(dc.CheckpointExistsError, match="a checkpoint is here"):
        convert(sample.folder, first)
    with pytest.raises(dc.CheckpointExistsError, match="overlap"):
        convert(first, f"{first}/below")
    put(url := new_url(), "notes.txt", b"mine")
    with pytest.raises(dc.CheckpointExistsError, match=r"holds 'notes\.txt'"):
        convert(sample.folder, url)
    with pytest.raises(dc.UnsupportedFormatError, match="not a local path"):
        convert(sample.folder, new_url(), "safetensors")
    with pytest.raises(dc.CheckpointNotFoundError, match="does not exist"):
        convert(new_url(), second)


@pytest.mark.parametrize(
    "command",
    [
        ("ls", "--fingerprint"),
        ("show", "decoder.weight"),
        ("stats",),
        ("verify",),
        ("plan", "--tp", "2"),
        ("diff",),
    ],
    ids=lambda command: command[0],
)
def test_a_command_prints_the_same_as_of_a_disk(
    sample: Sample, dckpt: Run, command: tuple[str, ...]
) -> None:
    url = copied_up(sample.folder, new_url())
    name, *rest = command
    rest = [str(sample.folder), "--equal-nan"] if name == "diff" else rest
    of_store, of_disk = (dckpt(name, place, *rest) for place in (url, sample.folder))
    assert (of_store.code, of_store.err) == (of_disk.code, of_disk.err)
    assert of_store.code == 0
    if name != "stats":  # which tells the blocks of files on a disk
        shown = re.sub(r"\s+", "", of_store.out).replace(url, str(sample.folder))
        assert shown == re.sub(r"\s+", "", of_disk.out)


def test_no_credentials_are_one_sentence(dckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def client(*_: object) -> None:
        raise GenericError("Error performing PUT http://169.254.169.254/latest/api/token")

    monkeypatch.setattr(object_store, "_client", client)
    finished = dckpt("ls", "s3://bucket/run", code=2, out="")
    assert finished.err.startswith("error: no credentials were found here: set AWS_ACCESS_KEY_ID ")
    with pytest.raises(dc.CheckpointingException, match=r"^no credentials"):
        dc.save({"step": 1}, "s3://bucket/run/1")
