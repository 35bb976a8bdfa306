"""Shows the ``Example:`` of a docstring as code on the site: griffe calls it ``Examples:``."""

from __future__ import annotations

import importlib
from typing import Any

griffe: Any = importlib.import_module("griffe")


class ExampleSections(griffe.Extension):  # type: ignore[misc]  # griffe is there when the site is built
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = text.replace("\nExample:\n", "\nExamples:\n")
