"""Pictures of what happens when: time runs to the right."""

from __future__ import annotations

from itertools import pairwise

from drawing import Drawing


def save_line() -> Drawing:
    """The line of a save over three ranks."""
    drawing = Drawing(
        "save",
        "Three ranks save. Each describes its shards; one exchange gives all of them the same "
        "table; each checks and plans for itself and writes its part; all agree that it went well; "
        "rank 0 writes metadata.json, and the checkpoint exists.",
        760,
        236,
    )
    left, top, lane = 74, 50, 46
    for rank in range(3):
        y = top + rank * lane
        drawing.text(left - 14, y + 18, f"rank {rank}", "small mute", anchor="end")
        drawing.line([(left, y + 13), (722, y + 13)], colour="line")
        _step(drawing, left, y, 76, "describe", "c0")
        _step(drawing, 196, y, 104, "check · plan", "c2")
        _step(drawing, 312, y, (196, 176, 188)[rank], "write", "c1", strong=True)
    _step(drawing, 596, top, 68, "commit", "c3")
    for x, word in ((173, "exchange"), (552, "agree"), (692, "agree")):
        drawing.rect(x - 10, top - 8, 20, 3 * lane - 4, fill="mute", opacity=0.22, radius=5)
        drawing.text(x, top - 16, word, "small", anchor="middle")
    bottom = top + 3 * lane
    notes = (
        (left + 38, "a small table", "middle"),
        (248, "pure functions", "middle"),
        (410, "the bulk I/O", "middle"),
        (640, "metadata.json", "middle"),
    )
    for x, words, anchor in notes:
        drawing.text(
            x, bottom + 14, words, "mono mute" if "." in words else "small mute", anchor=anchor
        )
    drawing.text(
        left,
        bottom + 42,
        "At the grey bars ranks wait for each other. If one has failed, all raise its error.",
        "small",
    )
    return drawing


def _step(
    drawing: Drawing,
    x: float,
    y: float,
    width: float,
    word: str,
    colour: str,
    *,
    strong: bool = False,
) -> None:
    drawing.rect(x, y, width, 26, fill="paper", radius=4)
    drawing.rect(
        x, y, width, 26, fill=colour, opacity=0.45 if strong else 0.22, line=colour, radius=4
    )
    drawing.text(x + width / 2, y + 17, word, "small", anchor="middle")


def async_save() -> Drawing:
    """Who is busy during an asynchronous save, with both ways of capturing."""
    drawing = Drawing(
        "async",
        "With capture copy, training stops while its state is copied, and goes on while a thread "
        "writes, agrees and commits. With capture background, training does not stop: the copy is "
        "made during the next forward and backward, and the optimizer waits for its end.",
        760,
        330,
    )
    left = 92

    def lanes(y: float, title: str, note: str) -> None:
        drawing.text(left, y, title, "bold mono")
        drawing.text(left + 190, y, note, "small mute")
        drawing.text(left - 14, y + 35, "training", "small mute", anchor="end")
        drawing.text(left - 14, y + 75, "thread", "small mute", anchor="end")
        for row in (18, 58):
            drawing.line([(left, y + row + 13), (736, y + row + 13)], colour="line")

    def training(y: float, words: list[tuple[float, str]], start: float) -> None:
        x = start
        for width, word in words:
            _step(drawing, x, y, width, word, "c0")
            x += width + 4

    y = 24
    lanes(y, 'capture="copy"', "the default: stop, copy, go on")
    training(y + 18, [(54, "step")], left)
    _step(drawing, left + 58, y + 18, 86, "copy", "stop", strong=True)
    training(y + 18, [(66, "step")] * 7, left + 148)
    _step(drawing, left + 148, y + 58, 250, "write", "c1", strong=True)
    _step(drawing, left + 402, y + 58, 60, "agree", "c2")
    _step(drawing, left + 466, y + 58, 64, "commit", "c3")
    drawing.line([(left + 58, y + 12), (left + 58, y + 96)], dash="3 3")
    drawing.line([(left + 144, y + 12), (left + 144, y + 96)], dash="3 3")
    drawing.text(left + 101, y + 110, "blocked", "small", anchor="middle", colour="stop")
    drawing.text(
        left + 530, y + 110, "the checkpoint is there; result() returns", "small", anchor="end"
    )
    drawing.line([(left + 530, y + 98), (left + 530, y + 87)], arrow=True)

    y = 180
    lanes(y, 'capture="background"', "the optimizer waits, if it comes too early")
    training(y + 18, [(54, "step"), (66, "forward"), (84, "backward")], left)
    fence = left + 54 + 66 + 84 + 12
    _step(drawing, fence, y + 18, 100, "optimizer.step", "c0")
    training(y + 18, [(66, "step")] * 4, fence + 104)
    _step(drawing, left + 58, y + 58, 128, "copy", "mute", strong=True)
    _step(drawing, left + 190, y + 58, 250, "write", "c1", strong=True)
    _step(drawing, left + 444, y + 58, 60, "agree", "c2")
    _step(drawing, left + 508, y + 58, 64, "commit", "c3")
    drawing.line([(fence - 2, y + 12), (fence - 2, y + 98)], dash="3 3")
    drawing.text(
        fence - 2,
        y + 112,
        "handle.fence(optimizer): not before the copy is made",
        "small",
        anchor="middle",
    )
    drawing.text(left, y + 140, "Nothing of the state may change while it is copied.", "small mute")
    return drawing


def commit() -> Drawing:
    """The files of a save in their order, and what a crash leaves."""
    drawing = Drawing(
        "commit",
        "A save writes attempt.json, then data and common.pt, syncs them to the disk, then "
        "index.json, then metadata.json. A crash before metadata.json leaves no checkpoint and "
        "leftovers that the next save removes; after it the checkpoint is whole.",
        760,
        196,
    )
    y = 56
    steps = (
        (14, 136, "attempt.json", "c0", "names all that comes"),
        (162, 186, "data, common.pt", "c1", "from every rank at once"),
        (360, 80, "fsync", "c2", "files, folders"),
        (452, 108, "index.json", "c0", "what is stored"),
        (572, 130, "metadata.json", "c3", "four fields"),
    )
    for x, width, name, colour, note in steps:
        drawing.rect(x, y, width, 32, fill=colour, opacity=0.24, line=colour, radius=5)
        drawing.text(x + width / 2, y + 20, name, "mono", anchor="middle")
        drawing.text(x + width / 2, y - 12, note, "small mute", anchor="middle")
    for (x, width, *_), (following, *_) in pairwise(steps):
        drawing.line([(x + width, y + 16), (following - 1, y + 16)])
    drawing.line([(702, y + 16), (744, y + 16)], arrow=True)
    low = y + 58
    drawing.line([(14, low), (700, low)], colour="stop", thick=3)
    drawing.line([(704, low), (744, low)], colour="c2", thick=3)
    drawing.line([(702, y + 40), (702, low + 46)], dash="3 3")
    drawing.text(
        356,
        low + 22,
        "killed here: there is no checkpoint",
        "bold",
        anchor="middle",
        colour="stop",
    )
    drawing.text(
        356,
        low + 42,
        "the next save into the folder deletes what attempt.json names, and no more",
        "small mute",
        anchor="middle",
    )
    drawing.text(702, low + 62, "the commit: from here on it is whole", "small", anchor="end")
    return drawing
