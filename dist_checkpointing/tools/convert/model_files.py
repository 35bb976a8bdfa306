"""The small files of a Hugging Face model beside its weights: its configuration and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

MODEL_FILES_KEY: Final = "hugging_face"
"""Where the common state of a checkpoint keeps them: name -> bytes."""

_CONFIG = "config.json"
_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_MOST_BYTES = 128 * 2**20


def _is_carried(name: str) -> bool:
    return (
        Path(name).name == name
        and not name.startswith(".")
        and name.endswith(_SUFFIXES)
        and not name.endswith(".index.json")
    )


def model_files(folder: Path) -> dict[str, bytes]:
    """The small files of a model by name; empty for a folder without a configuration."""
    if not (folder / _CONFIG).is_file():
        return {}
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if _is_carried(path.name) and path.is_file() and path.stat().st_size <= _MOST_BYTES
    }


def files_to_write(common: dict[Any, Any]) -> dict[str, bytes]:
    """The files that a common state keeps; nothing that could be written elsewhere."""
    kept = common.get(MODEL_FILES_KEY)
    if not isinstance(kept, dict):
        return {}
    return {
        name: data
        for name, data in kept.items()
        if isinstance(name, str) and isinstance(data, bytes) and _is_carried(name)
    }
