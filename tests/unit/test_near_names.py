from __future__ import annotations

import pytest

from dist_checkpointing.errors import hint, near_names

KEYS = ["decoder.layers.0.weight", "decoder.layers.0.bias", "embedding.word", "Norm.Weight"]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("decoder.layers.0.weightt", "decoder.layers.0.weight"),
        ("embeddingg.word", "embedding.word"),
        ("embedding", "embedding.word"),
        ("norm.weight", "Norm.Weight"),
    ],
)
def test_the_likeliest_comes_first(name: str, first: str) -> None:
    assert near_names(name, KEYS)[0] == first
    assert f"did you mean {first!r}" in hint(name, KEYS)


@pytest.mark.parametrize("name", ["", "zzzz", "0"])
def test_nothing_is_like_it(name: str) -> None:
    assert hint(name, ["alpha", "beta"]) == ""
    assert near_names(name, []) == []


def test_among_very_many() -> None:
    keys = [f"decoder.layers.{i}.mlp.expert.{j}.weight" for i in range(1000) for j in range(100)]
    assert near_names("decoder.layers.777.mlp.exprt.55.weight", keys)[0] == (
        "decoder.layers.777.mlp.expert.55.weight"
    )
    assert len(near_names("expert.7", keys, count=5)) == 5
