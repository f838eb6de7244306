"""How griffe reads the package: our section "Example:", and names that are imported late."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Gives the section the name by which griffe knows it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that griffe has read."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)


class LazyNames(griffe.Extension):
    """Names that only type checkers import are exported too: a room imports them on first use."""

    def on_alias_instance(self, *, alias: griffe.Alias, **_: Any) -> None:
        """Called for every import that griffe has read."""
        alias.runtime = True
