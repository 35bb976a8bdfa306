"""Saves once into an object store, for test_saves.py: URL NUMBER GO [DIE_AT].

It begins when the file GO is there, and says what became of the save. It dies of SIGKILL before its
DIE_AT-th request.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from dist_checkpointing import CheckpointingException, save
from dist_checkpointing.filesystem import ObjectStore
from store_saves import numbered


def die_at(last: int) -> None:
    requests = count(1)

    def counted(method: Any) -> Any:
        def request(*args: Any, **kwargs: Any) -> Any:
            if next(requests) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **kwargs)

        return request

    for name, method in list(vars(ObjectStore).items()):
        if callable(method) and not name.startswith("_"):
            setattr(ObjectStore, name, counted(method))


def main(url: str, number: str, go: str, *last: str) -> None:
    while not Path(go).exists():
        time.sleep(0.001)
    if last:
        die_at(int(last[0]))
    try:
        save(numbered(int(number)), url)
        said = "committed"
    except CheckpointingException as error:
        said = type(error).__name__
    sys.stdout.write(said + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
