"""Patches for other projects, which `make test-upstream` tries on checkouts of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from stream_balancer import planning

sys.path.append(str(Path(__file__).parents[2] / "examples" / "upstream"))
import own_tests

PATCHES = sorted(own_tests.HERE.glob("*.patch"))


def test_every_patch_is_tried_by_a_commit_that_the_table_has() -> None:
    table = (own_tests.HERE / "README.md").read_text()
    assert {path.stem.partition("_")[0] for path in PATCHES} == set(own_tests.PROJECTS)
    for project in own_tests.PROJECTS.values():
        assert f"| {project.repository} | {project.commit} |" in table


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_is_small_and_only_adds_and_asks_for_public_names(patch: Path) -> None:
    lines = patch.read_text().splitlines()
    assert len(lines) <= 300
    # a context line or a removed one would be a copy of theirs
    assert all(line.startswith(("+", "@@ ", "--- a/")) for line in lines)
    assert all(re.fullmatch(r"@@ -\d+,0 \+\d+(,\d+)? @@", line) for line in lines if line.startswith("@@"))
    asked = set(re.findall(r"planning\.(\w+)\(", "\n".join(lines)))
    assert asked <= set(planning.__all__)
    if patch.stem.partition("_")[0] != "TransferQueue":
        assert "+except ImportError:" in lines
        assert asked
