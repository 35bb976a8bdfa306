"""Saves once into an object store, for test_saves.py: URL NUMBER GO [DIE_AT].

It begins when the file GO is there, and says what became of the save. It dies of SIGKILL before its
DIE_AT-th request.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from dist_checkpointing import CheckpointingException, save
from faults import store_requests
from store_saves import numbered


def main(url: str, number: str, go: str, last: str = "0") -> None:
    while not Path(go).exists():
        time.sleep(0.001)
    left = [int(last)]

    def dying(_: str, __: str, request: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return request()

    try:
        with store_requests(dying):
            save(numbered(int(number)), url)
        said = "committed"
    except CheckpointingException as error:
        said = type(error).__name__
    sys.stdout.write(said + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
