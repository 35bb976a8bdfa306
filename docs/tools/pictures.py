"""The pictures of the documentation: ``python docs/tools/pictures.py`` draws them anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drawing import Drawing
from timelines import async_save, commit, save_line

FOLDER = Path(__file__).parents[1] / "pictures"
CELL = 16
"""Edge of one element of a drawn tensor."""


def pictures() -> Iterator[Drawing]:
    """All of them."""
    yield logo()
    yield reshard()
    yield words()
    yield flattened()
    yield replicas()
    yield save_line()
    yield async_save()
    yield commit()


def cells(
    drawing: Drawing, x: float, y: float, rows: int, columns: int, cell: float = CELL
) -> None:
    """The thin lines between the elements of a tensor."""
    for row in range(1, rows):
        drawing.line(
            [(x, y + row * cell), (x + columns * cell, y + row * cell)], colour="line", thick=0.5
        )
    for column in range(1, columns):
        drawing.line(
            [(x + column * cell, y), (x + column * cell, y + rows * cell)], colour="line", thick=0.5
        )


def logo() -> Drawing:
    """A tensor that is cut in two ways."""
    drawing = Drawing("logo", "dist_checkpointing", 32, 32)
    for colour, x, y, width, height in (
        ("#6ba7e6", 3, 3, 12, 15),
        ("#f0a04b", 17, 3, 12, 7),
        ("#5cc28c", 17, 12, 12, 17),
        ("#c58bd9", 3, 20, 12, 9),
    ):
        drawing.shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" fill="{colour}"/>'
        )
    return drawing


def reshard() -> Drawing:
    """Four ranks save a tensor cut in two by two; three load it cut in rows."""
    drawing = Drawing(
        "reshard",
        "Four ranks hold a tensor of 8 by 12 elements cut in two by two. The checkpoint stores it "
        "in eight chunks. Three other ranks load three, three and two rows of it, each from the "
        "chunks that its rows meet.",
        760,
        216,
    )
    top, rows, columns = 56, 8, 12
    width, height = columns * CELL, rows * CELL
    quarters = [(0, 0, "c0"), (0, 6, "c1"), (4, 0, "c2"), (4, 6, "c3")]

    def tint(x: float, y: float, opacity: float) -> None:
        for row, column, colour in quarters:
            drawing.rect(
                x + column * CELL, y + row * CELL, 6 * CELL, 4 * CELL, fill=colour, opacity=opacity
            )

    left, middle, right = 12, 284, 556
    for x, title in ((left, "4 ranks, cut 2 by 2"), (middle, "the checkpoint"), (right, "3 ranks")):
        drawing.text(x, 24, title, "bold")
    drawing.text(left, 42, "each holds one box of w", "small mute")
    drawing.text(middle, 42, "chunks: row blocks of the shards", "small mute")
    drawing.text(right, 42, "3, 3 and 2 rows of w", "small mute")

    tint(left, top, 0.16)
    cells(drawing, left, top, rows, columns)
    for rank, (row, column, colour) in enumerate(quarters):
        x, y = left + column * CELL, top + row * CELL
        drawing.rect(x + 1, y + 1, 6 * CELL - 2, 4 * CELL - 2, line=colour, thick=2)
        drawing.text(
            x + 3 * CELL, y + 2 * CELL + 5, f"rank {rank}", "bold", anchor="middle", colour=colour
        )

    tint(middle, top, 0.16)
    for row in range(0, rows, 2):
        for column in (0, 6):
            colour = next(c for r, k, c in quarters if r <= row < r + 4 and k == column)
            x, y = middle + column * CELL, top + row * CELL
            drawing.rect(
                x + 2, y + 2, 6 * CELL - 4, 2 * CELL - 4, line=colour, thick=1.25, radius=3
            )
    drawing.rect(middle - 4, top + 3 * CELL, width + 8, 3 * CELL, line="ink", thick=2, dash="5 3")

    cuts = [(0, 3), (3, 6), (6, 8)]
    for rank, (first, last) in enumerate(cuts):
        y = top + first * CELL + (rank - 1) * 7
        for _, column, colour in quarters[:2]:
            for row in range(first, last):
                shade = colour if row < 4 else {"c0": "c2", "c1": "c3"}[colour]
                drawing.rect(
                    right + column * CELL,
                    y + (row - first) * CELL,
                    6 * CELL,
                    CELL,
                    fill=shade,
                    opacity=0.16,
                )
        cells(drawing, right, y, last - first, columns)
        drawing.rect(
            right,
            y,
            width,
            (last - first) * CELL,
            line="ink",
            thick=2,
            dash="5 3" if rank == 1 else "",
        )
        drawing.text(
            right + width / 2,
            y + (last - first) * CELL / 2 + 5,
            f"rank {rank}",
            "bold",
            anchor="middle",
        )

    centre = top + height / 2
    for x, word in ((left + width, "save"), (middle + width, "load")):
        drawing.line([(x + 18, centre), (x + 62, centre)], thick=1.5, arrow=True)
        drawing.text(x + 40, centre - 8, word, "small", anchor="middle")
    drawing.text(
        middle + width / 2,
        top + height + 26,
        "what rank 1 of 3 reads: rows 3 to 5 of these chunks",
        "small mute",
        anchor="middle",
    )
    drawing.line(
        [(middle + width / 2, top + height + 12), (middle + width / 2, top + 6 * CELL + 3)],
        arrow=True,
    )
    drawing.text(
        left + width / 2,
        top + height + 26,
        "w has the shape (8, 12)",
        "small mute",
        anchor="middle",
    )
    return drawing


def words() -> Drawing:
    """Global tensor, shard, box, chunk, replica."""
    drawing = Drawing(
        "words",
        "A global tensor of shape (8, 12). One rank holds the shard with offset (4, 6) and shape "
        "(4, 6), in two copies with replica ids 0 and 1. It is stored as two chunks.",
        760,
        262,
    )
    cell, x, y = 18, 130, 52
    drawing.text(x, 22, "global tensor", "bold")
    drawing.text(x, 40, 'key "decoder.w", shape (8, 12)', "small mute")
    drawing.rect(x, y, 12 * cell, 8 * cell, fill="card", line="mute", thick=1.25)
    cells(drawing, x, y, 8, 12, cell)
    for row, column in ((0, 0), (0, 6), (4, 0)):
        drawing.rect(x + column * cell, y + row * cell, 6 * cell, 4 * cell, line="mute")
    drawing.rect(
        x + 6 * cell,
        y + 4 * cell,
        6 * cell,
        4 * cell,
        fill="c0",
        opacity=0.25,
        line="c0",
        thick=2.5,
    )
    drawing.line([(x - 14, y), (x - 14, y + 4 * cell)], arrow=True)
    drawing.text(x - 22, y + 2 * cell + 4, "offset 4", "small mute", anchor="end")
    drawing.line([(x, y + 8 * cell + 14), (x + 6 * cell, y + 8 * cell + 14)], arrow=True)
    drawing.text(x + 3 * cell, y + 8 * cell + 32, "offset 6", "small mute", anchor="middle")

    start = x + 12 * cell
    sx, sy = 470, 70
    drawing.line([(start, y + 4 * cell), (sx + 14, sy - 14)], colour="c0", dash="3 3")
    drawing.line([(start, y + 8 * cell), (sx + 14, sy + 4 * 24 - 14)], colour="c0", dash="3 3")
    drawing.rect(sx + 14, sy - 14, 6 * 24, 4 * 24, fill="paper", line="c0", dash="4 3")
    drawing.rect(sx, sy, 6 * 24, 4 * 24, fill="paper", line="c0", thick=2.5)
    drawing.rect(sx, sy, 6 * 24, 2 * 24, fill="c0", opacity=0.30)
    drawing.rect(sx, sy + 48, 6 * 24, 2 * 24, fill="c0", opacity=0.14)
    cells(drawing, sx, sy, 4, 6, 24)
    drawing.line([(sx, sy + 48), (sx + 144, sy + 48)], colour="c0", thick=2)
    drawing.text(sx, 22, "shard", "bold")
    drawing.text(sx, 40, "box: offset (4, 6), shape (4, 6)", "small mute")
    drawing.text(sx + 72, sy + 29, "chunk", "bold", anchor="middle", colour="c0")
    drawing.text(sx + 72, sy + 77, "chunk", "bold", anchor="middle", colour="c0")
    drawing.line([(sx + 190, sy - 5), (sx + 164, sy - 5)], arrow=True)
    drawing.text(sx + 196, sy - 8, "another copy:", "small")
    drawing.text(sx + 196, sy + 8, "replica_id 1", "mono mute")
    drawing.line([(sx + 190, sy + 72), (sx + 150, sy + 72)], arrow=True)
    drawing.text(sx + 196, sy + 69, "main replica:", "small")
    drawing.text(sx + 196, sy + 85, "replica_id 0", "mono mute")
    drawing.text(sx, sy + 126, "The main replica is written, as one chunk or", "small mute")
    drawing.text(sx, sy + 143, "as several. A chunk is a box too.", "small mute")
    return drawing


def flattened() -> Drawing:
    """A flattened range of a shard, and the boxes that it is made of."""
    drawing = Drawing(
        "flattened",
        "Elements 4 to 20 of the flattening of a shard of 4 rows and 6 columns: the last two of "
        "row 0, all of rows 1 and 2, the first three of row 3. Three boxes.",
        760,
        186,
    )
    cell, y = 26, 58
    x = 12
    drawing.text(x, 22, "one shard, 4 by 6", "bold")
    drawing.text(x, 40, "flattened_range=slice(4, 21)", "mono mute")
    boxes = [(0, 4, 1, 2, "c1"), (1, 0, 2, 6, "c0"), (3, 0, 1, 3, "c2")]
    for number in range(24):
        row, column = divmod(number, 6)
        inside = 4 <= number < 21
        drawing.rect(
            x + column * cell,
            y + row * cell,
            cell,
            cell,
            fill="mute" if inside else "card",
            opacity=0.28 if inside else 1,
            line="line",
        )
        drawing.text(
            x + column * cell + cell / 2,
            y + row * cell + 17,
            str(number),
            "mono" if inside else "mono mute",
            anchor="middle",
        )
    middle = 270
    drawing.line([(x + 6 * cell + 18, y + 52), (middle - 18, y + 52)], thick=1.5, arrow=True)
    drawing.text(middle, 22, "in memory: 17 elements", "bold")
    drawing.text(middle, 40, "one 1-D tensor", "small mute")
    short = 12
    place = middle
    for _, _, rows, columns, colour in boxes:
        size = rows * columns * short
        drawing.rect(place, y + 40, size, cell, fill=colour, opacity=0.3, line=colour, thick=1.5)
        drawing.text(
            place + size / 2, y + 57, str(rows * columns), "mono", anchor="middle", colour=colour
        )
        place += size
    right = 540
    drawing.line([(place + 18, y + 52), (right - 18, y + 52)], thick=1.5, arrow=True)
    drawing.text(right, 22, "the same elements: 3 boxes", "bold")
    drawing.text(right, 40, "never more than 2 ndim - 1", "small mute")
    drawing.rect(right, y, 6 * cell, 4 * cell, fill="card", line="line")
    cells(drawing, right, y, 4, 6, cell)
    for row, column, rows, columns, colour in boxes:
        drawing.rect(
            right + column * cell + 1,
            y + row * cell + 1,
            columns * cell - 2,
            rows * cell - 2,
            fill=colour,
            opacity=0.3,
            line=colour,
            thick=2,
        )
    return drawing


def replicas() -> Drawing:
    """What four replicas write, by default and sharing."""
    drawing = Drawing(
        "replicas",
        "Four ranks hold the same tensors. By default rank 0 writes all of them. With the wrapper "
        "each rank writes a quarter. On load each reads all, or a quarter and passes it on.",
        760,
        226,
    )
    sizes = [("c0", 60), ("c1", 50), ("c2", 52), ("c3", 58)]
    total = sum(size for _, size in sizes)
    for column, (title, note, shared) in enumerate(
        (
            ("default", "the main replica writes", False),
            ("FullyParallelSaveStrategyWrapper", "every holder writes a part", True),
        )
    ):
        x = 70 + column * 360
        drawing.text(x, 22, title, "bold" if not shared else "bold mono")
        drawing.text(x, 40, note, "small mute")
        for rank in range(4):
            y = 56 + rank * 32
            drawing.text(x - 12, y + 16, f"rank {rank}", "small mute", anchor="end")
            drawing.rect(x, y, total, 22, fill="card", line="line", radius=3)
            place = x
            for owner, (colour, size) in enumerate(sizes):
                if (shared and owner == rank) or (not shared and rank == 0):
                    drawing.rect(
                        place if not shared else x, y, size, 22, fill=colour, opacity=0.75, radius=3
                    )
                place += size
        end = x + (total if not shared else 60)
        drawing.line([(end, 52), (end, 190)], colour="stop", thick=1.5, dash="4 3")
        drawing.text(
            end if shared else end - 8,
            208,
            "the save ends here",
            "small",
            anchor="middle" if shared else "end",
            colour="stop",
        )
    return drawing


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for drawing in pictures():
        (FOLDER / f"{drawing.name}.svg").write_text(drawing.svg())


if __name__ == "__main__":
    main()
