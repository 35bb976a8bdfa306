import pytest

from dist_checkpointing.format import Index, StoredTensor, dtypes
from dist_checkpointing.format.file_names import key_pattern
from dist_checkpointing.planning import Keep, Recipe
from dist_checkpointing.planning.recipe import derive
from dist_checkpointing.tools.convert import ConvertOptions, plan_conversion
from dist_checkpointing.tools.ls import Entry, as_tree
from dist_checkpointing.tools.plan import cut_keys, parse_rule

FLOAT = dtypes.from_name("float32")
KEYS = ["model.layers.0.w", "model.layers.10.w", "optimizer.w", "a[0]/b\nc"]


PATTERNS = [
    ("layers.1", []),  # a part of a key is not enough
    ("optimizer.w", KEYS[2:3]),
    ("optimizer_w", []),  # a dot is a dot
    ("model.layers.{i}.w", KEYS[:2]),
    ("model.{name*}.w", KEYS[:2]),
    ("{name*}1{name*}", []),  # the same name stands for the same text
    ("{x*}.1{y*}", KEYS[1:2]),
    ("optimizer.*", KEYS[2:3]),
    (".*w$", KEYS[:3]),
    (r"a\[0\]/{x*}", KEYS[3:]),
]


@pytest.mark.parametrize(("pattern", "keys"), PATTERNS)
def test_every_command_and_recipe_reads_a_pattern_alike(pattern: str, keys: list[str]) -> None:
    assert list(filter(key_pattern(pattern).fullmatch, KEYS)) == keys
    rule = parse_rule(f"{pattern}=0")
    cut = [
        own.key
        for own in cut_keys(Index.of(whole(key) for key in KEYS), 1, [rule])
        if own.axis == 0
    ]
    assert cut == keys
    options = ConvertOptions(reshard=[f"{pattern}:axis=0,parts=2"])
    made = derive(Recipe(), Index.of(whole(key) for key in KEYS))
    planned = plan_conversion(made, {}, options).tensors
    assert [own.stored.key for own in planned if own.chunk_shape] == sorted(keys)
    assert [key for key, *_ in Keep(pattern).matches(KEYS)] == keys


def whole(key: str) -> StoredTensor:
    return StoredTensor.undivided(key, FLOAT, (2,))


def test_a_tree_sums_up_and_loses_nothing() -> None:
    keys = ["a.b", "a.b.c", "a/b", "a..b", "", ".", "x" * 5, ".".join("y" * 500)]
    entries = [Entry(key, (), "float32", 4, "1 chunk") for key in keys]
    root = as_tree(entries)
    assert (root.num_entries, root.num_bytes) == (len(keys), 4 * len(keys))

    found = []
    waiting = [root]
    while waiting:
        branch = waiting.pop()
        waiting += branch.below.values()
        found += [branch.entry] if branch.entry else []
        assert branch.num_entries == sum(b.num_entries for b in branch.below.values()) + bool(
            branch.entry
        )
    assert sorted(entry.key for entry in found) == sorted(keys)
