"""Files with recipes in them: JSON or YAML, and what is wrong with them."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_checkpointing.errors import CheckpointingException, Finding, hint
from dist_checkpointing.planning.recipe_rules import CastTo, Drop, Keep, Missing, Rename, Rule
from dist_checkpointing.planning.recipe_shapes import (
    Concat,
    Resize,
    Split,
    Stack,
    Transpose,
    Unstack,
)

if TYPE_CHECKING:
    from dist_checkpointing.planning.recipe import Recipe

_KINDS = (Rename, Drop, Keep, CastTo, Missing, Resize, Split, Concat, Transpose, Stack, Unstack)
RULES: Mapping[str, type[Rule]] = {kind.name: kind for kind in _KINDS}
"""The rules by the names that they have in files."""


def rules_of_file(place: Path) -> list[Rule | Recipe]:
    """The rules in a file, see ``Recipe.read``.

    Raises:
        CheckpointingException: for a file that cannot be read, naming the rule.
    """
    try:
        text = place.read_text()
        is_yaml = place.suffix in (".yaml", ".yml")
        rows = _yaml(place)(text) if is_yaml else json.loads(text, object_pairs_hook=_once_each)
    except (OSError, ValueError) as error:
        raise _unreadable(place, str(error)) from error
    if not isinstance(rows, list):
        raise _unreadable(place, "it must be a list of rules")
    rules = []
    for number, row in enumerate(rows, 1):
        try:
            rules.append(_rule(row))
        except (CheckpointingException, TypeError, ValueError) as error:
            raise _unreadable(place, f"rule {number}: {error}") from error
    return rules


def _unreadable(place: Path, problem: str, remedy: str | None = None) -> CheckpointingException:
    finding = Finding(problem, path=str(place), remedy=remedy)
    return CheckpointingException("the recipe cannot be read", [finding])


def _yaml(place: Path) -> Callable[[str], Any]:
    try:
        yaml = import_module("yaml")
    except ModuleNotFoundError as error:
        remedy = "pip install 'dist_checkpointing[yaml]', or write it as JSON."
        raise _unreadable(place, "the package PyYAML is missing", remedy) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _once_each([(self.construct_object(key), None) for key, _ in node.value])
            made: dict[Any, Any] = super().construct_mapping(node, deep)
            return made

    def parse(text: str) -> Any:
        try:
            return yaml.load(text, Loader)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error

    return parse


def _once_each(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """An object of a file. Of two rules in one object the parsers take the second in silence."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name!r} is there {count} times in one rule")
    return dict(pairs)


def _rule(row: object) -> Rule | Recipe:
    if not isinstance(row, dict) or not row:
        raise ValueError(f"a rule is an object such as {{'rename': 'a', 'to': 'b'}}, not {row!r}")
    # Not at the top: ready-made recipes are made of what is here.
    from dist_checkpointing.planning.llama_recipes import READY_MADE  # noqa: PLC0415

    names = [name for name in row if name in RULES or name == "use"]
    if not names:
        raise ValueError(_unknown(next(iter(row)), (*RULES, "use")))
    if len(names) > 1:
        raise ValueError(f"one object is one rule, not {' and '.join(map(repr, names))}: {row}")
    (name,) = names
    first, others = row[name], {key: value for key, value in row.items() if key != name}
    if name != "use":
        make: Any = RULES[name]
        taken = [first]
    elif isinstance(first, str) and first in READY_MADE:
        name, make, taken = first, READY_MADE[first], []
    else:
        raise ValueError(_unknown(first, READY_MADE))
    known = dict([*inspect.signature(make).parameters.items()][len(taken) :])
    for other in others:
        if other not in known:
            own = ", ".join(known) or "nothing else"
            raise ValueError(f"{name} takes {own}, not {other!r}{hint(str(other), known)}")
    for other, parameter in known.items():
        if parameter.default is parameter.empty and other not in others:
            raise ValueError(f"{name} needs {other!r}")
    rule: Rule | Recipe = make(*taken, **others)
    return rule


def _unknown(name: object, known: Iterable[str]) -> str:
    return f"{name!r} is not one of {', '.join(known)}{hint(str(name), known)}"
