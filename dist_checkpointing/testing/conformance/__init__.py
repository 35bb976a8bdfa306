"""The suite that every backend passes: subclass it, name the backend, run pytest.

::

    from dist_checkpointing.testing import StrategyConformance

    class TestMyBackend(StrategyConformance):
        backend = ("mine", 1)

The backend is found like any other, through its entry points; to test a strategy that is not
registered, or one with options, override ``save_strategy`` and ``load_strategy``.
"""

from dist_checkpointing.testing.conformance.contents import HOSTILE_KEYS, WEIRD_KEYS, Contents
from dist_checkpointing.testing.conformance.failures import Failures
from dist_checkpointing.testing.conformance.hooks import failures_on
from dist_checkpointing.testing.conformance.protocol import StorageProtocol
from dist_checkpointing.testing.conformance.round_trips import RoundTrips

__all__ = [
    "HOSTILE_KEYS",
    "WEIRD_KEYS",
    "Contents",
    "Failures",
    "RoundTrips",
    "StorageProtocol",
    "StrategyConformance",
    "failures_on",
]


class StrategyConformance(RoundTrips, Contents, StorageProtocol, Failures):
    """All that ``save`` and ``load`` promise, tested with one backend on 1, 2 and 4 ranks.

    Set ``backend``. May be overridden: ``save_strategy``, ``load_strategy``, ``dtypes``,
    ``refused_keys``, ``damage``, ``shorten``; see BackendHooks. The tests are the methods of the
    four bases, which may be used by themselves too.

    Example:
        >>> class TestZarr(StrategyConformance):
        ...     backend = ("zarr", 2)
    """
