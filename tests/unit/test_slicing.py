import pytest

from dist_checkpointing.checkpoint.slicing import parse_slices


@pytest.mark.parametrize(
    "text", ["", "a", "1:2:3:4", "1,,2", "1.5", "1:b", "....", "True", "[[1]]"]
)
def test_text_that_is_no_slice(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read .* in the slice") as raised:
        parse_slices(text)
    assert "0:4,:8" in str(raised.value)
