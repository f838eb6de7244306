"""How griffe reads the package: its sections, and names that are imported late."""

import re
from typing import Any

import griffe


def mend_sections(docstring: str) -> str:
    """A docstring of ours in the sections that griffe knows.

    "Example:" has another name there. And griffe takes what stands before the first colon of
    "Returns:" for a type, though ours are in the signature: an empty one in front keeps the
    sentence whole.
    """
    docstring = re.sub(r"(?m)^Example:$", "Examples:", docstring)
    return re.sub(r"(?m)^((?:Returns|Yields):\n +)(?=[^:\n]*:)", r"\1: ", docstring)


class Examples(griffe.Extension):
    """Gives sections the form in which griffe knows them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that griffe has read."""
        if obj.docstring:
            obj.docstring.value = mend_sections(obj.docstring.value)


class LazyNames(griffe.Extension):
    """Names that only type checkers import are exported too: a room imports them on first use."""

    def on_alias_instance(self, *, alias: griffe.Alias, **_: Any) -> None:
        """Called for every import that griffe has read."""
        alias.runtime = True
