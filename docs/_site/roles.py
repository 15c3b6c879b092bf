"""A griffe extension: Sphinx roles in docstrings become plain code, which Markdown understands."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|mod|attr|exc|data):`(?:~?[\w.]*\.)?(\w+)`")


class Roles(griffe.Extension):
    """:class:`X` -> `X`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that was loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value).replace("\n::\n", "\n")
