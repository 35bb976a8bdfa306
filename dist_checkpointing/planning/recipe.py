"""Recipe: what a load or a conversion makes of stored tensors; recipe files in JSON and YAML."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from dist_checkpointing.errors import CheckpointingException, Finding, StateMismatchError, hint
from dist_checkpointing.format.dtypes import DType
from dist_checkpointing.format.file_names import WHOLE_KEY
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping.tensor_memory import is_lossless
from dist_checkpointing.planning.derived_tensors import DerivedTensor
from dist_checkpointing.planning.quantization import BlockQuantization
from dist_checkpointing.planning.recipe_rules import (
    RULES,
    Change,
    Drop,
    Missing,
    Rule,
    Tensors,
    Wanted,
    texts_of,
)

T = TypeVar("T", DerivedTensor, str)
_Made = TypeVar("_Made", bound="Callable[..., Recipe]")

READY_MADE: dict[str, Callable[..., Recipe]] = {}
"""The ready-made recipes by the names that they have in files."""


def ready_made(recipe: _Made) -> _Made:
    """Note a function that makes a recipe, for files to name."""
    READY_MADE[recipe.__name__] = recipe
    return recipe


def _unreadable(path: Path, problem: str, remedy: str | None = None) -> CheckpointingException:
    finding = Finding(problem, path=str(path), remedy=remedy)
    return CheckpointingException("the recipe cannot be read", [finding])


def _yaml(text: str) -> Any:
    yaml = import_module("yaml")

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key for key, _ in node.value]
            # Before the look at the keys: it refuses what cannot be one, and names the line.
            made: dict[Any, Any] = super().construct_mapping(node, deep)
            _once_each([(self.construct_object(key), None) for key in keys])
            return made

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _once_each(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """An object of a file. Of two rules in one object the parsers take the second in silence."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name!r} is there {count} times in one rule")
    return dict(pairs)


def _rule(row: object) -> Rule | Recipe:
    if not isinstance(row, dict) or not row:
        raise ValueError(f"a rule is an object such as {{'rename': 'a', 'to': 'b'}}, not {row!r}")
    names = [name for name in row if name in RULES or name == "use"]
    if not names:
        _require_known(next(iter(row)), (*RULES, "use"))
    if len(names) > 1:
        raise ValueError(f"one object is one rule, not {' and '.join(map(repr, names))}: {row}")
    (name,) = names
    others = {**row}
    first = others.pop(name)
    make: Any
    if name == "use":
        _require_known(first, READY_MADE)
        name, make = first, READY_MADE[first]
    else:
        make = partial(RULES[name], first)
    known = inspect.signature(make).parameters
    for other in others:
        if other not in known:
            own = ", ".join(known) or "nothing else"
            raise ValueError(f"{name} takes {own}, not {other!r}{hint(str(other), known)}")
    for other, parameter in known.items():
        if parameter.default is parameter.empty and other not in others:
            raise ValueError(f"{name} needs {other!r}")
    rule: Rule | Recipe = make(**others)
    return rule


def _require_known(name: object, known: Iterable[str]) -> None:
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{name!r} is not one of {', '.join(known)}{hint(str(name), known)}")


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
        >>> from dist_checkpointing.planning import Recipe, Rename, Resize
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

        A rule is an object with the name of the rule in it: ``{"rename": "a", "to": "b"}``.
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
        path = Path(path)
        try:
            text = path.read_text()
            is_yaml = path.suffix in (".yaml", ".yml")
            rows = _yaml(text) if is_yaml else json.loads(text, object_pairs_hook=_once_each)
        except ModuleNotFoundError as error:
            remedy = "pip install 'dist_checkpointing[yaml]', or write it as JSON."
            raise _unreadable(path, "the package PyYAML is missing", remedy) from error
        except (OSError, ValueError, RecursionError) as error:
            raise _unreadable(path, str(error)) from error
        if not isinstance(rows, list):
            raise _unreadable(path, "it must be a list of rules")
        import_module("dist_checkpointing.planning.model_recipes")  # it adds to what is known
        rules = []
        for number, row in enumerate(rows, 1):
            try:
                rules.append(_rule(row))
            except (CheckpointingException, TypeError, ValueError) as error:
                raise _unreadable(path, f"rule {number}: {error}") from error
        return cls(*rules)

    def __repr__(self) -> str:
        return f"Recipe({', '.join(map(str, self.rules))})"


def require_recipe(value: object) -> None:
    """Refuse what is no recipe.

    Raises:
        TypeError: saying how to make one.
    """
    if not isinstance(value, Recipe):
        how = "Recipe(rule, ...), or Recipe.read(path) for a file"
        raise TypeError(f"recipe must be a Recipe, not {value!r}; make one by {how}")


@dataclass(frozen=True, eq=False)
class Derivation:
    """What a recipe makes of a checkpoint; ``str()`` of it is the text of a dry run.

    ``objects`` are the stored keys of sharded objects by their new keys, ``kept_objects`` stay as
    they are in the template. ``counts`` are the rules, each with the number of tensors and objects
    that it matches; ``stored`` is the index of the checkpoint. ``idle`` are patterns that match
    nothing, of rules that drop or keep several.
    """

    tensors: Tensors
    objects: Mapping[str, str]
    kept_objects: frozenset[str]
    objects_left_out: Sequence[str]
    counts: Sequence[tuple[Rule, int]]
    stored: Index
    idle: Sequence[str]

    @cached_property
    def index(self) -> Index:
        """The tensors as if they were stored; what is only renamed or cast is cut as it is."""
        if not self.counts:
            return self.stored
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
        if len(tensor.pieces) != 1 or tensor.pieces[0].key is None:
            return None
        own = self.stored[tensor.pieces[0].key]
        return own if tensor == DerivedTensor.of_stored(own, tensor.dtype) else None

    @cached_property
    def _num_used(self) -> Counter[str]:
        """Number of elements of each stored tensor that fill something."""
        found = Counter[str]()
        for piece in chain.from_iterable(tensor.pieces for tensor in self.tensors.values()):
            own = piece.quantization
            is_of_scales = isinstance(own, BlockQuantization) and own.makes_scales
            for key, box in piece.stored_boxes:
                found[key] += 0 if is_of_scales else box.num_elements
        return found

    @property
    def left_out(self) -> list[str]:
        """Keys of the stored tensors that fill nothing."""
        used = self._num_used
        return [key for key in self.stored if key not in used and self.stored[key].num_bytes]

    @property
    def cut(self) -> dict[str, tuple[int, int]]:
        """Stored tensors that are used in part: elements left out, and all elements, by key."""
        used = self._num_used
        sizes = {key: math.prod(self.stored[key].global_shape) for key in used}
        return {key: (n - used[key], n) for key, n in sizes.items() if used[key] < n}

    def rounded_from(self, key: str) -> list[str]:
        """The stored dtypes that its dtype cannot hold in every value."""
        tensor = self.tensors[key]
        dtypes = {self.stored[own].dtype for own in tensor.sources}
        return sorted(d.name for d in dtypes if not is_lossless(d.torch, tensor.dtype.torch))

    def cast_from(self, key: str) -> set[DType]:
        """The other dtypes of what is stored as values; codes of quantized tensors are not."""
        tensor = self.tensors[key]
        plain = (p.key for p in tensor.pieces if p.key is not None and p.quantization is None)
        return {self.stored[own].dtype for own in plain} - {tensor.dtype}

    @property
    def unused(self) -> list[Finding]:
        """The rules and patterns that match nothing, in one finding, if there are any."""
        rows = enumerate(self.counts, 1)
        rules = [f"rule {number} ({rule})" for number, (rule, count) in rows if not count]
        rules += self.idle
        return [Finding(f"nothing matches {', '.join(rules)}: {WHOLE_KEY}")] if rules else []

    @property
    def changed(self) -> list[str]:
        """Keys of the tensors that are not as they are stored."""
        stored = self.stored
        return [
            key
            for key, tensor in self.tensors.items()
            if key not in stored or tensor != DerivedTensor.of_stored(stored[key])
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
            "rounded": {key: dtypes for key in self.changed if (dtypes := self.rounded_from(key))},
            "left_out": self.left_out,
            "cut": {key: count for key, (count, _) in self.cut.items()},
            "objects": {new: old for new, old in self.objects.items() if new != old},
            "objects_left_out": [*self.objects_left_out],
        }

    def __str__(self) -> str:
        changed, left, texts = self.changed, self.left_out, []
        for key in changed:
            own, rounded = self.tensors[key], ", ".join(self.rounded_from(key))
            text = f"{key}  {own.dtype.name}{list(own.shape)} <- {self.origin(key)}"
            texts.append(f"{text}; rounded from {rounded}" if rounded else text)
        texts += [f"left out: {key}" for key in left]
        texts += [f"left out: {n} of {all_} elements of {k}" for k, (n, all_) in self.cut.items()]
        texts += [f"object {new} <- {old}" for new, old in self.objects.items() if new != old]
        texts += [f"object {key} <- template" for key in sorted(self.kept_objects)]
        texts += [f"left out: object {key}" for key in self.objects_left_out]
        rules = [
            f"rule {number}: {rule}: {f'{count} matched' if count else 'matches nothing'}"
            for number, (rule, count) in enumerate(self.counts, 1)
        ]
        return "\n".join([*rules, *_together(texts), self.summary])

    @property
    def summary(self) -> str:
        """How many tensors are made, left out and so on, in one line."""
        changed = len(self.changed)
        return (
            f"tensors: {len(self.tensors)} ({changed} by rules, {len(self.tensors) - changed} as "
            f"stored), {len(self.left_out)} left out, {len(self.cut)} in part; rules that match "
            f"nothing: {sum(not n for _, n in self.counts)} of {len(self.counts)}"
        )


def _of_layers(key: str) -> str:
    """The key with ``*`` for the numbers in it, which those of all layers share."""
    return _NUMBERS.sub("*", key)


def _together(texts: Iterable[str]) -> list[str]:
    """One text for those that differ in the number of a layer only."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(_of_layers(text), []).append(text)
    groups = alike.items()
    return [own[0] if len(own) == 1 else f"{pattern}  ({len(own)})" for pattern, own in groups]


def derive(
    recipe: Recipe,
    index: Index,
    objects: Iterable[str] = (),
    wanted: Wanted | None = None,
    wanted_objects: Iterable[str] = (),
) -> Derivation:
    """Apply a recipe to what is stored: tensors, and the keys of sharded objects.

    A pure function: nothing is read. ``wanted`` and ``wanted_objects`` are those of a template, if
    there is one.

    Raises:
        TypeError: if ``recipe`` is no Recipe.
        StateMismatchError: naming the first rule that does not fit, and every tensor on which it
            fails.
    """
    require_recipe(recipe)
    tensors = {key: DerivedTensor.of_stored(index[key]) for key in index}
    names = stored_names = {key: key for key in objects}
    counts, idle = [], list[str]()
    for number, rule in enumerate(recipe.rules, 1):
        if isinstance(rule, Drop) and len(patterns := texts_of(rule.patterns)) > 1:
            found = (any(map(rule.compiled(p).fullmatch, chain(tensors, names))) for p in patterns)
            rows = zip(patterns, found, strict=True)
            idle += [f"{pattern!r} of rule {number}" for pattern, is_used in rows if not is_used]
        change = rule.change(tensors, wanted)
        rest, findings, count = _changed(tensors, change, "tensors"), change.findings, change.count
        if rule.is_for_names and not findings:
            change = rule.change(names, wanted)
            names, count = _changed(names, change, "objects"), count + change.count
            findings = change.findings
        findings += [
            Finding("a tensor and a sharded object would have this name", key)
            for key in names
            if key in rest and not (key in tensors and names[key] == key)
        ]
        StateMismatchError.raise_if(findings, f"rule {number} of the recipe does not fit: {rule}")
        tensors = rest
        counts.append((rule, count))
    kept: frozenset[str] = frozenset()
    if wanted is not None:
        counts, kept = _fill_missing(counts, tensors, wanted, {*wanted_objects} - names.keys())
    left = sorted(stored_names.keys() - names.values())
    return Derivation(tensors, names, kept, left, counts, index, idle)


def _changed(things: dict[str, T], change: Change, what: str) -> dict[str, T]:
    """The tensors, or stored keys of the objects, by their new names; notes names that clash."""
    taken = {*change.taken}
    rest = {key: own for key, own in things.items() if key not in taken} if taken else things
    for key, made in change.made:
        other = rest.setdefault(key, made)
        if not key:
            change.findings.append(Finding("it would have no name", ", ".join(_sources(made))))
        elif other is not made:
            both = " and ".join(", ".join(_sources(own)[:3]) for own in (other, made))
            problem = f"several {what} would have this name"
            remedy = "Drop or rename one of them before."
            change.findings.append(Finding(problem, key, found=f"made of {both}", remedy=remedy))
    return rest


def _sources(own: DerivedTensor | str) -> Sequence[str]:
    return (own,) if isinstance(own, str) else own.sources


def _fill_missing(
    counts: Sequence[tuple[Rule, int]],
    tensors: dict[str, DerivedTensor],
    wanted: Wanted,
    objects: Iterable[str],
) -> tuple[list[tuple[Rule, int]], frozenset[str]]:
    """Add the tensors that are missing; counts of the rules that say how, and objects to keep."""
    rules = [rule for rule, _ in counts if isinstance(rule, Missing)]
    filled = Counter[int]()
    kept = set()
    for key in [*(key for key in wanted if key not in tensors), *objects]:
        rule = next((rule for rule in rules if any(rule.matches([key]))), None)
        if rule is None:
            continue
        filled[id(rule)] += 1
        if key in wanted and rule.fill != "error":
            tensors[key] = DerivedTensor.filled(*wanted[key], rule.fill)
        elif rule.fill == "template":
            kept.add(key)
    return [(rule, count + filled[id(rule)]) for rule, count in counts], frozenset(kept)
