"""Recipes: load what is not quite the same. Pure: index and recipe say what comes from where."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from dist_checkpointing.errors import CheckpointingException, Finding, StateMismatchError
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.planning.derived import DerivedTensor
from dist_checkpointing.planning.recipe_rules import (
    CastTo,
    Drop,
    Keep,
    Misfit,
    Missing,
    NameRule,
    Rename,
    Rule,
    Tensors,
    Wanted,
)
from dist_checkpointing.planning.recipe_shapes import (
    Concat,
    Resize,
    Split,
    Stack,
    Transpose,
    Unstack,
)

_KINDS = (Rename, Drop, Keep, CastTo, Missing, Resize, Split, Concat, Transpose, Stack, Unstack)
RULES: Mapping[str, type[Rule]] = {kind.name: kind for kind in _KINDS}
"""The rules by the names that they have in files."""


_NUMBERS = re.compile(r"(?<![^.])\d+(?![^.,])")


class Recipe:
    """What to make of the tensors of a checkpoint before a template asks for them.

    The rules are applied in their order, each to what the ones before it have made. What no rule
    matches stays as it is. Nothing is read: a recipe only says which box of which stored tensor
    fills a box that is wanted.

    Args:
        rules: Rules, or recipes whose rules are taken.

    Attributes:
        rules: The rules.

    Example:
        >>> from dist_checkpointing.planning.recipe import Recipe, Rename, Resize
        >>> vocabulary = ShardedTensor.from_rank_offsets("embed.weight", torch.ones(3, 2))
        >>> save({"embed": vocabulary}, "ckpt")
        >>> recipe = Recipe(Rename("embed.weight", to="wte"), Resize("wte", axis=0))
        >>> padded = ShardedTensor.from_rank_offsets("wte", torch.empty(4, 2))
        >>> load({"wte": padded}, "ckpt", recipe=recipe)["wte"][:, 0]
        tensor([1., 1., 1., 0.])
    """

    def __init__(self, *rules: Rule | Recipe) -> None:
        self.rules: tuple[Rule, ...] = tuple(
            own for rule in rules for own in (rule.rules if isinstance(rule, Recipe) else (rule,))
        )
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"a recipe is made of rules and recipes, not {rule!r}")

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Recipe:
        """The recipe in a file: a list of rules, in JSON or (``.yaml``, ``.yml``) YAML.

        A rule is an object whose first name is that of the rule: ``{"rename": "a", "to": "b"}``.
        ``{"use": "llama_to_megatron", "num_query_groups": 8}`` stands for the rules of a
        ready-made recipe.

        Raises:
            CheckpointingException: for a file that cannot be read, naming the rule; for YAML
                without the package PyYAML.

        Example:
            >>> _ = Path("recipe.json").write_text('[{"drop": "lm_head.{x}"}]')
            >>> Recipe.read("recipe.json")
            Recipe(drop 'lm_head.{x}')
        """
        place = Path(path)
        try:
            text = place.read_text()
            rows = _yaml(place)(text) if place.suffix in (".yaml", ".yml") else json.loads(text)
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
        return cls(*rules)

    def __repr__(self) -> str:
        return f"Recipe({', '.join(map(str, self.rules))})"


def _unreadable(place: Path, problem: str, remedy: str | None = None) -> CheckpointingException:
    finding = Finding(problem, path=str(place), remedy=remedy)
    return CheckpointingException("the recipe cannot be read", [finding])


def _yaml(place: Path) -> Callable[[str], Any]:
    try:
        yaml = import_module("yaml")
    except ModuleNotFoundError as error:
        remedy = "pip install 'dist_checkpointing[yaml]', or write it as JSON."
        raise _unreadable(place, "the package PyYAML is missing", remedy) from error

    def parse(text: str) -> Any:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error

    return parse


def _rule(row: object) -> Rule | Recipe:
    if not isinstance(row, dict) or not row:
        raise ValueError(f"a rule is an object such as {{'rename': 'a', 'to': 'b'}}, not {row!r}")
    (name, first), *others = row.items()
    if name == "use":
        # Not at the top: ready-made recipes are made of what is here.
        from dist_checkpointing.planning.llama_recipes import READY_MADE  # noqa: PLC0415

        if first not in READY_MADE:
            raise ValueError(f"{first!r} is not one of {', '.join(READY_MADE)}")
        return READY_MADE[first](**dict(others))
    if name not in RULES:
        raise ValueError(f"{name!r} is not one of {', '.join((*RULES, 'use'))}")
    make: Any = RULES[name]
    rule: Rule = make(first, **dict(others))
    return rule


@dataclass(frozen=True, eq=False)
class Derivation:
    """What a recipe makes of a checkpoint; ``str()`` of it is the text of a dry run.

    Attributes:
        tensors: Tensors by key.
        objects: Stored keys of the sharded objects, by their new keys.
        counts: The rules, each with the number of tensors and objects that it matches.
        stored: Index of the checkpoint.
    """

    tensors: Tensors
    objects: Mapping[str, str]
    counts: Sequence[tuple[Rule, int]]
    stored: Index

    @cached_property
    def index(self) -> Index:
        """The tensors as if they were stored; what is only renamed or cast is cut as it is."""
        rows, fingerprints = [], {}
        for key, tensor in self.tensors.items():
            own = self.stored_as(tensor)
            if own is None:
                rows.append(StoredTensor.undivided(key, tensor.dtype, tensor.shape))
                continue
            rows.append(replace(own, key=key, dtype=tensor.dtype))
            if tensor.dtype == own.dtype and own.key in self.stored.fingerprints:
                fingerprints[key] = self.stored.fingerprints[own.key]
        return replace(Index.of(rows), fingerprints=fingerprints)

    def stored_as(self, tensor: DerivedTensor) -> StoredTensor | None:
        """The stored tensor that it is, but for name and dtype."""
        sources = tensor.sources
        if len(sources) != 1:
            return None
        own = self.stored[sources[0]]
        whole = DerivedTensor.of_stored(own.key, own.global_shape, tensor.dtype)
        return own if tensor == whole else None

    def fill_of(self, key: str) -> str:
        """What fills a tensor or object that is missing; ``"error"`` for nothing."""
        rule = _filling(self.counts, key)
        return "error" if rule is None else rule.fill

    @property
    def left_out(self) -> list[str]:
        """Keys of the stored tensors that fill nothing."""
        used = {key for tensor in self.tensors.values() for key in tensor.sources}
        return [key for key in self.stored if key not in used and self.stored[key].num_bytes]

    @property
    def idle(self) -> list[str]:
        """The rules that match nothing, as texts with their numbers."""
        rows = enumerate(self.counts, 1)
        return [f"rule {number} ({rule})" for number, (rule, count) in rows if not count]

    @property
    def changed(self) -> list[str]:
        """Keys of the tensors that are not as they are stored."""
        return [
            key
            for key, tensor in self.tensors.items()
            if (own := self.stored_as(tensor)) is None
            or (own.key, own.dtype) != (key, tensor.dtype)
        ]

    def origin(self, key: str) -> str:
        """Where a tensor comes from: the stored keys, and what else fills it."""
        tensor = self.tensors[key]
        fills = [piece.fill for piece in tensor.pieces if piece.key is None]
        sources = dict.fromkeys(map(_of_layers, tensor.sources)) if len(tensor.sources) > 1 else {}
        return ", ".join([*(sources or tensor.sources), *dict.fromkeys(fills)]) or "nothing"

    def as_json(self) -> dict[str, Any]:
        """The same as ``str()``, for JSON."""
        return {
            "rules": [{"rule": str(rule), "matched": count} for rule, count in self.counts],
            "tensors": {key: self.origin(key) for key in self.changed},
            "left_out": self.left_out,
        }

    def __str__(self) -> str:
        lines = []
        for number, (rule, count) in enumerate(self.counts, 1):
            found = f"{count} matched" if count else "matches nothing"
            lines.append(f"rule {number}: {rule}: {found}")
        changed, left = self.changed, self.left_out
        texts = []
        for key in changed:
            own = self.tensors[key]
            texts.append(f"{key}  {own.dtype.name}{list(own.shape)} <- {self.origin(key)}")
        lines += _together([*texts, *(f"left out: {key}" for key in left)])
        lines.append(
            f"{len(self.tensors)} tensors: {len(changed)} by rules, "
            f"{len(self.tensors) - len(changed)} as stored; {len(left)} stored ones left out; "
            f"{len(self.idle)} of {len(self.counts)} rules match nothing"
        )
        return "\n".join(lines)


def _of_layers(key: str) -> str:
    """The key with ``*`` for the numbers in it, which those of all layers share."""
    return _NUMBERS.sub("*", key)


def _together(texts: Iterable[str]) -> Iterator[str]:
    """One text for those that differ in the number of a layer only."""
    own = list(texts)
    counts = Counter(map(_of_layers, own))
    for text in own:
        count = counts.pop(_of_layers(text), 0)
        if count:
            yield text if count == 1 else f"{_of_layers(text)}  ({count})"


def derive(
    recipe: Recipe, index: Index, objects: Iterable[str] = (), wanted: Wanted | None = None
) -> Derivation:
    """Apply a recipe to what is stored. A pure function: nothing is read.

    Args:
        recipe: rules.
        index: what is stored.
        objects: keys of the sharded objects that are stored.
        wanted: global shapes and dtypes of the tensors of a template, if there is one.

    Raises:
        StateMismatchError: naming the first rule that does not fit, and every tensor on which it
            fails.
    """
    tensors: dict[str, DerivedTensor] = {
        key: DerivedTensor.of_stored(key, index[key].global_shape, index[key].dtype)
        for key in index
    }
    names = {key: key for key in objects}
    counts = []
    for number, rule in enumerate(recipe.rules, 1):
        change = rule.change(tensors, wanted)
        count = change.count
        taken = {*change.taken}
        rest = tensors
        if taken:
            rest = {key: tensor for key, tensor in tensors.items() if key not in taken}
        findings = list(change.findings)
        for key, tensor in change.made:
            if rest.setdefault(key, tensor) is not tensor or not key:
                findings.append(Finding("several tensors would have this name", key))
        if isinstance(rule, NameRule) and not findings:
            names, matched = _renamed(rule, names, findings)
            count += matched
        if findings:
            message = f"rule {number} of the recipe does not fit: {rule}"
            raise StateMismatchError(message, findings)
        tensors = rest
        counts.append((rule, count))
    if wanted is not None:
        counts = _fill_missing(counts, tensors, wanted)
    return Derivation(tensors, names, counts, index)


def _renamed(
    rule: NameRule, names: Mapping[str, str], findings: list[Finding]
) -> tuple[dict[str, str], int]:
    """The sharded objects by their new names, and how many the rule matches."""
    try:
        matched, changed = rule.new_names(names)
    except Misfit as misfit:
        findings.append(misfit.finding)
        return {}, 0
    found: dict[str, str] = {}
    for key, stored in names.items():
        new = changed.get(key, key)
        if new is not None and found.setdefault(new, stored) != stored:
            findings.append(Finding("several objects would have this name", new))
    return found, len(matched)


def _fill_missing(
    counts: Sequence[tuple[Rule, int]], tensors: dict[str, DerivedTensor], wanted: Wanted
) -> list[tuple[Rule, int]]:
    """Add the tensors that are missing; the counts of the rules that say how."""
    filled: dict[int, int] = {}
    for key in [key for key in wanted if key not in tensors]:
        rule = _filling(counts, key)
        if rule is not None:
            filled[id(rule)] = filled.get(id(rule), 0) + 1
            if rule.fill != "error":
                tensors[key] = DerivedTensor.filled(*wanted[key], rule.fill)
    return [(rule, count + filled.get(id(rule), 0)) for rule, count in counts]


def _filling(counts: Sequence[tuple[Rule, int]], key: str) -> Missing | None:
    """The first rule that says what a missing key gets."""
    found = (rule for rule, _ in counts if isinstance(rule, Missing) and rule.applies_to(key))
    return next(found, None)
