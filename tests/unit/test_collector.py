"""The garbage collector is held back while we compute, and on again afterwards."""

import gc
import os
import threading

import pytest

from dist_checkpointing.threads import paused_collector


def test_it_is_off_until_the_last_thread_has_computed() -> None:
    def compute() -> None:
        with paused_collector():
            assert not gc.isenabled()

    with paused_collector():
        other = threading.Thread(target=compute)
        other.start()
        other.join()
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_it_is_on_in_a_child_that_was_forked_meanwhile() -> None:
    with paused_collector():
        child = os.fork()
        if child == 0:
            os._exit(10 + gc.isenabled())
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 11
    assert gc.isenabled()
