"""What mkdocs asks for while it builds the site (see ``hooks`` in mkdocs.yml).

A page may say, on a line of its own::

    <!-- include: README.md#Speed -->        the text below that heading of a file of the repository
    <!-- include: benchmarks/README.md -->    a whole file, without its title
    <!-- include: examples/train_gpt.py -->   a program, without its docstring
    <!-- commands -->                         the help of every command of ``dckpt``

Pictures are put into the page itself, so that they follow its light or dark colours. Types of
Python, NumPy and torch in a signature lead to the documentation of those.
"""

from __future__ import annotations

import builtins
import importlib
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"

_INCLUDE: Final = re.compile(r"^<!-- include: ([\w./-]+)(?:#(.+))? -->$", re.MULTILINE)
_COMMANDS: Final = re.compile(r"^<!-- commands -->$", re.MULTILINE)
_FENCE: Final = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_HEADING: Final = re.compile(r"^(#+) +(.+?) *$", re.MULTILINE)
_LINK: Final = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_END_OF_DOCSTRING: Final = '"""\n\n'
_UNRESOLVED: Final = re.compile(r'<span title="([\w.]+)">([\w.]+)</span>')
_PYTHON: Final = "https://docs.python.org/3/library/"
_TORCH: Final = "https://docs.pytorch.org/docs/stable/"
_NUMPY: Final = "https://numpy.org/doc/stable/reference/"
_PAGES: Final = {
    "numpy.int64": f"{_NUMPY}arrays.scalars",
    "numpy.uint64": f"{_NUMPY}arrays.scalars",
    "numpy.typing.NDArray": f"{_NUMPY}typing",
    "torch.Tensor": f"{_TORCH}tensors",
    "torch.device": f"{_TORCH}tensor_attributes",
    "torch.distributed.ProcessGroup": f"{_TORCH}distributed",
    "torch.distributed.tensor.DTensor": f"{_TORCH}distributed.tensor",
    "torch.dtype": f"{_TORCH}tensor_attributes",
    "torch.futures.Future": f"{_TORCH}futures",
    "torch.nn.Module": f"{_TORCH}generated/torch.nn.Module",
    "torch.optim.Optimizer": f"{_TORCH}optim",
}
_PICTURE: Final = re.compile(r'<p><img alt="([^"]*)" src="[^"]*pictures/([\w-]+)\.svg" ?/?></p>')


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Fill in what a page takes from elsewhere."""
    source = page.file.src_uri
    text = _INCLUDE.sub(lambda match: included(match[1], match[2], source), markdown)
    return _COMMANDS.sub(lambda _: command_help(), text)


def included(path: str, heading: str | None, page: str) -> str:
    """The text of a file, or of one section of it, with links that work from ``page``.

    Raises:
        ValueError: if the file has no such heading.
    """
    text = (ROOT / path).read_text()
    if path.endswith(".py"):
        return f"```python\n{text.partition(_END_OF_DOCSTRING)[2]}```"
    text = _section(text, heading, path)
    up = "../" * (len(PurePosixPath(page).parts) - 1)

    def moved(match: re.Match[str]) -> str:
        target = _normal(PurePosixPath(path).parent / match[2])
        if target.startswith("docs/"):
            return f"[{match[1]}]({up}{target.removeprefix('docs/')}{match[3] or ''})"
        return f"`{target}`"  # not part of the site

    return _LINK.sub(moved, text)


def _section(text: str, heading: str | None, path: str) -> str:
    # Headings are looked for outside code, where a line may begin with # too.
    bare = _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    headings = [(m.start(), m.end(), len(m[1]), m[2]) for m in _HEADING.finditer(bare)]
    if heading is None:
        start = headings[0][1] if headings and headings[0][2] == 1 else 0
        return text[start:]
    for position, (_, start, level, title) in enumerate(headings):
        if title == heading:
            following = (s for s, _, other, _ in headings[position + 1 :] if other <= level)
            return text[start : next(following, len(text))]
    raise ValueError(f"{path} has no heading {heading!r}")


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def command_help() -> str:
    """What ``dckpt COMMAND --help`` says, for every command, as markdown."""
    typer = importlib.import_module("typer")
    app = importlib.import_module("dist_checkpointing.tools.app").app
    has_markup = app.rich_markup_mode == "rich"
    app.rich_markup_mode = None  # text, instead of boxes drawn for a terminal
    group = typer.main.get_command(app)
    # Resilient: nothing is missing, and nothing is done.
    top = group.make_context("dckpt", [], resilient_parsing=True, terminal_width=88)
    sections = [_help(group, top, has_markup=has_markup)]
    for name, command in group.commands.items():
        context = command.make_context(name, [], parent=top, resilient_parsing=True)
        # ``command`` may stand for one that is imported only now.
        text = _help(context.command, context, has_markup=has_markup)
        sections.append(f"## dckpt {name}\n\n{text}")
    return "\n".join(sections)


def _help(command: Any, context: Any, *, has_markup: bool) -> str:
    if has_markup:
        plain = importlib.import_module("rich.text").Text.from_markup
        for described in (command, *command.params):
            for name in ("help", "epilog", "short_help"):
                words = getattr(described, name, None)
                if words:
                    setattr(described, name, plain(words).plain)
    return f"```text\n{command.get_help(context).strip()}\n```\n"


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Put pictures into the page."""

    def inline(match: re.Match[str]) -> str:
        svg = (DOCS / "pictures" / f"{match[2]}.svg").read_text()
        # The words in a picture make no sense in a search result.
        return f'<figure class="picture" data-search-exclude>{svg[svg.index("<svg") :]}</figure>'

    return _PICTURE.sub(inline, html)


def on_post_page(output: str, page: Any, config: Any) -> str:  # noqa: ARG001
    """Link the types that are documented elsewhere."""

    def linked(match: re.Match[str]) -> str:
        address = address_of(match[1])
        return f'<a href="{address}" title="{match[1]}">{match[2]}</a>' if address else match[0]

    return _UNRESOLVED.sub(linked, output)


def address_of(name: str) -> str | None:
    """Where a type of another library is documented, by its full name; None if nobody knows."""
    module = name.rpartition(".")[0]
    found = getattr(builtins, name, None)
    if isinstance(found, type):
        page = "functions" if name in ("object", "type") else "stdtypes"
        page = _PYTHON + ("exceptions" if issubclass(found, BaseException) else page)
    elif module.partition(".")[0] in sys.stdlib_module_names:
        page = _PYTHON + module
    elif module.startswith("torch.distributed.checkpoint"):
        page = f"{_TORCH}distributed.checkpoint"
    elif name in _PAGES:
        page = _PAGES[name]
    else:
        return None
    return f"{page}.html#{name}"
