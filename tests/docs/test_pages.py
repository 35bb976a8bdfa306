"""The listings of the documentation run, its links lead somewhere, its pictures are up to date."""

import importlib
import importlib.util
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dist_checkpointing
from dist_checkpointing import ShardedTensor, load, save
from dist_checkpointing.comm import Comm
from dist_checkpointing.strategies import default_strategies
from dist_checkpointing.testing import run_ranks
from scripts import run_fresh

ROOT = Path(dist_checkpointing.__file__).parents[1]
DOCS = ROOT / "docs"

pytestmark = [
    pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="not a checkout"),
    # torch says these of single processes and of itself.
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
scenes = _module(HERE / "scenes.py")
site_hooks = _module(DOCS / "tools" / "site_hooks.py")


def _pages() -> list[str]:
    pages = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in pages]


# Those that are not run say why in a comment above them.
_LISTING = re.compile(
    r"^(<!-- not run: [^\n]+ -->\n)?```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def _listings(path: Path) -> list[str]:
    """The Python of a page that is run, each after so many empty lines as are above it."""
    text = path.read_text()
    fences = re.findall(r"^```", text, re.MULTILINE)
    assert len(fences) == 2 * len(_LISTING.findall(text)), "a listing does not end"
    return [
        "\n" * text.count("\n", 0, found.start(3)) + found[3]
        for found in _LISTING.finditer(text)
        if found[2] == "python" and found[1] is None
    ]


def _execute(code: str, path: Path, names: dict[str, Any]) -> None:
    """A traceback shows the line of the page."""
    exec(compile(code, str(path), "exec"), names)


def _run(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "listing"}
    for number, code in enumerate(_listings(ROOT / page)):
        scenes.SCENES[page](number, names)
        _execute(code, ROOT / page, names)
    return names


@pytest.fixture
def _process() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    default_strategies.clear()


@pytest.mark.usefixtures("_process")
@pytest.mark.parametrize("page", [page for page in _pages() if _listings(ROOT / page)])
def test_the_listings_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert page in scenes.SCENES, f"{page} has listings: give it a scene in tests/docs/scenes.py"
    _run(page)


def test_a_listing_that_fails_is_named_by_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\nx.nonsense\n```\n")
    (code,) = _listings(page)
    with pytest.raises(AttributeError) as caught:
        _execute(code, page, {})
    last = caught.traceback[-1]
    assert (last.path, last.lineno + 1) == (page, 5)


def test_the_state_of_the_concepts_is_loaded_by_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    describe, full = _run("docs/concepts.md")["describe"], torch.arange(24.0).reshape(12, 2)

    def described(comm: Comm, vocabulary: object, w: torch.Tensor) -> Any:
        own = w.chunk(comm.world_size)[comm.rank]
        return describe(own, vocabulary, comm.rank, comm.world_size, 0)

    def loaded(world_size: int) -> torch.Tensor:
        filled = torch.empty(12, 2)
        given = run_ranks(world_size, lambda c: load(described(c, None, filled), "o", comm=c))
        assert [own["vocabulary"] for own in given] == [["a"]] * world_size
        return filled

    run_ranks(2, lambda comm: save(described(comm, ["a"], full), "o", comm=comm))
    assert all(loaded(world_size).equal(full) for world_size in (1, 3))


def test_the_backend_of_the_page_passes_the_suite_that_it_recommends(tmp_path: Path) -> None:
    (tmp_path / "test_npy.py").write_text("\n\n".join(_listings(DOCS / "backend.md")))
    # Few of its world sizes: tests/plugin has others, for strategies without a writer.
    chosen = ("-k", "not every_cut_to_every_cut or 2-4")
    done = run_fresh("-m", "pytest", "-q", *chosen, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_leaf_of_megatron_is_carried_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = _run("docs/migrating/megatron.md")
    leaf = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, 1, 4), replica_id=(0, 1))
    without_flattened = {k: v for k, v in vars(leaf).items() if k != "flattened_range"}
    theirs = type("Theirs", (), {})()
    vars(theirs).update(without_flattened, of_theirs_alone=1)
    assert repr(names["carried_over"](theirs)) == repr(leaf)


def test_a_partial_load_fills_only_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = _run("docs/partial.md")
    assert names["new"] == {"model.head.weight", "model.head.bias"}
    weight = names["table"].weight
    assert torch.equal(weight[:10], torch.ones(10, 4))
    assert torch.equal(weight[10:], names["new_rows"])


@pytest.mark.usefixtures("_process")
def test_the_run_that_went_back_is_where_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = _run("docs/async.md")["manager"]
    assert manager.latest() == 1200
    manager.close()


_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", _pages())
def test_relative_links_lead_to_files(page: str) -> None:
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    links = _LINK.findall(code.sub("", (ROOT / page).read_text()))
    targets = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)]
    folder = (ROOT / page).parent
    assert [target for target in targets if target and not (folder / target).exists()] == []


def test_every_public_name_is_in_the_reference() -> None:
    directives = re.compile(r"^::: (\S+)$", re.MULTILINE)
    named: set[str] = set()
    for page in (DOCS / "reference").glob("*.md"):
        named.update(directives.findall(page.read_text()))
    missing = {f"dist_checkpointing.{name}" for name in dist_checkpointing.__all__} - named
    assert missing == set()
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_pictures_are_those_that_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    drawn = {
        drawing.name: drawing.svg()
        for drawing in _module(DOCS / "tools" / "pictures.py").pictures()
    }
    stored = {path.stem: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert drawn == stored, "run python docs/tools/pictures.py"


def test_a_section_of_a_file_is_taken_into_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_hooks, "ROOT", tmp_path)
    (tmp_path / "F.md").write_text(
        "# F\n\n## One\n\n[a](docs/a.md#x) [b](b.py) [c](https://c)\n\n```sh\n## no heading\n```\n"
        "### Below\n\n## Two\n\nother\n"
    )
    expected = "[a](../a.md#x) `b.py` [c](https://c)\n\n```sh\n## no heading\n```\n### Below"
    assert site_hooks.included("F.md", "One", "sub/page.md").strip() == expected
    assert "[a](a.md#x)" in site_hooks.included("F.md", None, "page.md")
    (tmp_path / "f.py").write_text('"""A program.\n\nIt prints."""\n\nprint("[a](b.md)")\n')
    listing = '```python\nprint("[a](b.md)")\n```'
    assert site_hooks.included("f.py", None, "page.md") == listing
    with pytest.raises(ValueError, match=r"F\.md has no heading 'Three'"):
        site_hooks.included("F.md", "Three", "page.md")


def test_types_of_other_libraries_lead_to_their_documentation() -> None:
    def shown(name: str) -> str:
        span = f'<span title="{name}">X</span>'
        page: str = site_hooks.on_post_page(f"a {span} b", None, None)
        return page.removeprefix("a ").removesuffix(" b")

    python, torch_docs = "https://docs.python.org/3/library", "https://docs.pytorch.org/docs/stable"
    for name, address in {
        "int": f"{python}/stdtypes.html#int",
        "collections.abc.Sequence": f"{python}/collections.abc.html#collections.abc.Sequence",
        "torch.nn.Module": f"{torch_docs}/generated/torch.nn.Module.html#torch.nn.Module",
    }.items():
        assert shown(name) == f'<a href="{address}" title="{name}">X</a>'
    assert shown("elsewhere.Unknown") == '<span title="elsewhere.Unknown">X</span>'


@pytest.mark.parametrize("markup", ["rich", None])
def test_the_page_of_commands_is_made_of_their_help(
    markup: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    typer = pytest.importorskip("typer")
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(rich_markup_mode=markup, no_args_is_help=True, context_settings=settings)

    def ls(path: str) -> None:
        del path

    def rm(prefix: str = typer.Option("a", help="which tensors")) -> None:
        del prefix

    app.command("ls", help="List [bold]all[/bold].")(ls)
    app.command("rm-prefix", help="Remove tensors.", epilog="Example: dckpt rm-prefix x")(rm)
    module = ModuleType("dist_checkpointing.tools.app")
    vars(module)["app"] = app
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = site_hooks.command_help()
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert titles == ["dckpt ls", "dckpt rm-prefix"]
    assert [found[1] for found in _LISTING.findall(text)] == ["text"] * 3
    assert "Usage: dckpt rm-prefix [OPTIONS]" in text
    assert "[default: a]" in text
    assert text.count("-h, --help") == 3
    assert "Example: dckpt rm-prefix x" in text
    assert ("List all." if markup else "List [bold]all[/bold].") in text


@pytest.mark.exhaustive
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    options = ("--strict", "--quiet", "-d", tmp_path)
    built = run_fresh(
        "-m", "mkdocs", "build", *options, cwd=ROOT, environment={"NO_MKDOCS_2_WARNING": "1"}
    )
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    loaded = re.compile(
        r"<(?:script|img|iframe|source)[^>]+src=[\"']?(?:https?:)?//|"
        r"<link[^>]+href=[\"']?(?:https?:)?//|url\([\"']?(?:https?:)?//|@import"
    )
    pages = [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]
    assert len(pages) > 20
    assert [page for page in pages if loaded.search(page.read_text())] == []
