"""Hundreds of damaged copies of each backend: under verify, none is silently wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dist_checkpointing import (
    CheckpointingException,
    load,
    verify_checkpoint,
)
from samples import Samples

BACKENDS = ["tensorstore", "zarr-2", "zarr-2-zstd", "zarr-1", "torch_dist"]
COPIES = 500


def flip(content: bytearray, chance: random.Random, _: list[bytes]) -> bytes:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(content)


def cut(content: bytearray, chance: random.Random, _: list[bytes]) -> bytes:
    return bytes(content[: chance.randrange(len(content))])


def zeroed(content: bytearray, chance: random.Random, _: list[bytes]) -> bytes:
    start = chance.randrange(len(content))
    stop = min(len(content), start + chance.randrange(1, 64))
    content[start:stop] = bytes(stop - start)
    return bytes(content)


def grown(content: bytearray, chance: random.Random, _: list[bytes]) -> bytes:
    return bytes(content) + chance.randbytes(chance.randrange(1, 64))


def moved(content: bytearray, chance: random.Random, _: list[bytes]) -> bytes:
    start = chance.randrange(len(content))
    return bytes(content[start:] + content[:start])


def of_another_file(content: bytearray, chance: random.Random, others: list[bytes]) -> bytes:
    del content
    return chance.choice(others)


def gone(content: bytearray, chance: random.Random, others: list[bytes]) -> None:
    del content, chance, others


DAMAGES = (flip, flip, flip, cut, zeroed, grown, moved, of_another_file, gone)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BACKENDS)
def test_no_damaged_copy_is_silently_wrong(samples: Samples, tmp_path: Path, name: str) -> None:
    sample = samples(name).copied(tmp_path / "c")
    files = sorted(path for path in sample.folder.rglob("*") if path.is_file())
    contents = {path: path.read_bytes() for path in files}
    chance = random.Random(name)
    verified = refused = 0
    for number in range(COPIES):
        path = files[number % len(files)]
        whole = contents[path]
        others = [content for other, content in contents.items() if other != path]
        damage = chance.choice(DAMAGES) if whole else of_another_file
        content = damage(bytearray(whole), chance, others)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        try:
            loaded = load(sample.template(), sample.folder, verify=True)
        except (CheckpointingException, OSError):
            refused += 1
        else:
            sample.assert_is(loaded)
        try:
            verify_checkpoint(sample.folder)
        except (CheckpointingException, OSError):
            pass
        else:
            # What was changed is a byte that belongs to no value.
            verified += 1
            assert damage not in (cut, grown, gone) or content == whole, path
        path.write_bytes(whole)
    assert refused > COPIES // 2
    assert verified < COPIES // 4
    verify_checkpoint(sample.folder)
    sample.assert_is(load(sample.template(), sample.folder, verify=True))
