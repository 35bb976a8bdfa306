"""Boxes that make up a larger one, at random."""

from hypothesis import strategies as st

from dist_checkpointing.format import Box


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box of a tensor, which may have no element."""
    ends = [sorted(draw(st.tuples(*[st.integers(0, extent)] * 2))) for extent in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@st.composite
def tilings(draw: st.DrawFn, box: Box, depth: int = 5) -> list[Box]:
    """``box`` cut into boxes at random; not always along a grid."""
    axes = [axis for axis, extent in enumerate(box.shape) if extent > 1]
    if not axes or not depth or not draw(st.booleans()):
        return [box]
    axis = draw(st.sampled_from(axes))
    count = draw(st.integers(2, min(3, box.shape[axis])))
    cuts = sorted(
        draw(st.sets(st.integers(1, box.shape[axis] - 1), min_size=count - 1, max_size=count - 1))
    )
    tiles: list[Box] = []
    for start, stop in zip([0, *cuts], [*cuts, box.shape[axis]], strict=True):
        offset = (*box.offset[:axis], box.offset[axis] + start, *box.offset[axis + 1 :])
        part = Box(offset, (*box.shape[:axis], stop - start, *box.shape[axis + 1 :]))
        tiles += draw(tilings(part, depth - 1))
    return tiles
