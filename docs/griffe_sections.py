"""A section "Example:", as our docstrings have it, is shown as the programs that it holds."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Gives the section the name by which griffe knows it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that griffe has read."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
