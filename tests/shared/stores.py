"""Checkpoints in object stores: copies of folders, as a user would make them by hand."""

import json
import uuid
from pathlib import Path
from typing import Any, TypeVar

from dist_checkpointing import ObjectPath
from dist_checkpointing.format import data_folder
from samples import Sample

Url = TypeVar("Url", str, ObjectPath)


def new_url(scheme: str = "memory") -> str:
    """A URL that no other test uses."""
    return f"{scheme}://checkpoints/{uuid.uuid4().hex}/1000"


def _place(url: str | ObjectPath) -> ObjectPath:
    return ObjectPath.of(url) if isinstance(url, str) else url


def put(url: str | ObjectPath, name: str, data: bytes) -> None:
    """Put an object below a URL."""
    place = _place(url) / name
    place.store.put(place.key, data)


def data_url(url: str | ObjectPath) -> str:
    """Where the files of a checkpoint are, of which nothing else was left."""
    place = _place(url)
    (attempt,) = place.store.list_folder((place / "data").prefix)[0]
    return f"{url}/data/{attempt}"


def copied_up(folder: Path, url: Url) -> Url:
    """Copy a checkpoint into a store as a save there would leave it; ``url`` again."""
    attempt = uuid.uuid4().hex
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            put(url, f"data/{attempt}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    config = (folder / "metadata.json").read_bytes()
    commit = {"attempt": attempt, "config": json.loads(config)}
    put(url, ".dckpt/commits/1.json", json.dumps(commit).encode())
    put(url, "metadata.json", config)
    return url


def damage(url: str, name: str, change: Any) -> str:
    """Change an object below the data folder; its URL."""
    place = data_folder(url) / name
    assert isinstance(place, ObjectPath)
    data = change(place.store.get(place.key))
    place.store.delete([place.key])
    if data is not None:
        place.store.put(place.key, data)
    return str(place)


def data_names(sample: Sample) -> list[str]:
    """Files with values, by relative name."""
    named = (p.relative_to(sample.folder).as_posix() for p in sample.folder.rglob("*"))
    ends = (".distcp", "/c.0.0", "decoder.weight/0.0")
    return [n for n in named if n.startswith("data/model/") or n.endswith(ends)]
