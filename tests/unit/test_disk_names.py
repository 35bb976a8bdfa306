"""Folder names of many keys are those of each key by itself."""

from hypothesis import example, given
from hypothesis import strategies as st

from dist_checkpointing.format.file_names import disk_name, disk_names

KEYS = st.one_of(
    st.text(min_size=1, max_size=5),
    st.from_regex(r"[A-Za-z0-9._-]{1,6}", fullmatch=True),
    st.sampled_from(
        ["zarr.json", "metadata.json", "a" * 200, "a" * 201, ".a", "a\n", "\n", "a\n.b"]
    ),
)


@given(st.lists(KEYS, max_size=4))
@example([""])
@example(["a", ""])
@example(["a\nb"])
def test_many_names_are_the_names_of_each(keys: list[str]) -> None:
    assert disk_names(keys) == list(map(disk_name, keys))
