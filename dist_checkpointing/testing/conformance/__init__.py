"""The suite that every backend passes: subclass it, name the backend, run pytest."""

from dist_checkpointing.testing.conformance.backend_hooks import (
    failures_on as failures_on,
    observed as observed,
)
from dist_checkpointing.testing.conformance.calls_and_failures import (
    Failures as Failures,
    StorageProtocol as StorageProtocol,
)
from dist_checkpointing.testing.conformance.contents import (
    Contents as Contents,
    RoundTrips as RoundTrips,
)
from dist_checkpointing.testing.conformance.sample_shards import (
    CUT_SHAPE as CUT_SHAPE,
    CUTS as CUTS,
    assert_same_bits as assert_same_bits,
    data_of as data_of,
    poisoned as poisoned,
    random_bits as random_bits,
    template as template,
)


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
