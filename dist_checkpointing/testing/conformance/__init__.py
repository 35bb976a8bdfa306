"""The suite that every backend passes: subclass it, name the backend, run pytest."""

from dist_checkpointing.testing.conformance.backend_hooks import failures_on, observed
from dist_checkpointing.testing.conformance.call_order import StorageProtocol
from dist_checkpointing.testing.conformance.contents import HOSTILE_KEYS, WEIRD_KEYS, Contents
from dist_checkpointing.testing.conformance.failures import Failures
from dist_checkpointing.testing.conformance.round_trips import RoundTrips
from dist_checkpointing.testing.conformance.sample_shards import (
    CUT_SHAPE,
    CUTS,
    assert_same_bits,
    data_of,
    poisoned,
    random_bits,
    template,
)

__all__ = [
    "CUTS",
    "CUT_SHAPE",
    "HOSTILE_KEYS",
    "WEIRD_KEYS",
    "Contents",
    "Failures",
    "RoundTrips",
    "StorageProtocol",
    "StrategyConformance",
    "assert_same_bits",
    "data_of",
    "failures_on",
    "observed",
    "poisoned",
    "random_bits",
    "template",
]


class StrategyConformance(RoundTrips, Contents, StorageProtocol, Failures):
    """Tests of all that ``save`` and ``load`` promise, with one backend on 1, 2 and 4 ranks.

    A subclass sets ``backend``, which is found through its entry points. To test a strategy that is
    not registered, or one with options, it overrides ``save_strategy`` and ``load_strategy``. It
    may also override ``dtypes``, ``refused_keys``, ``damage`` and ``shorten``; see BackendHooks.
    The tests are methods of the four bases, each of which can be used alone.

    Example:
        >>> class TestZarr(StrategyConformance):
        ...     backend = ("zarr", 2)
    """
