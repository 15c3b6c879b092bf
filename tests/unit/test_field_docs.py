"""``help()`` explains every field."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc

import pytest

import stream_balancer as sb
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.host.journal import Recovered
from stream_balancer.statistics import CostFit, Straggler
from stream_balancer.types import SharedRollout

CLASSES = [
    sb.MicroBatches, sb.Rollout, sb.types.MicroBatch, sb.types.RankBatch, sb.Batch, sb.Statistics, Snapshot,
    Straggler, CostFit, Recovered, SharedRollout,
]  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_help_explains_every_public_field(cls: type) -> None:
    shown = pydoc.plain(pydoc.render_doc(cls))
    text = inspect.getdoc(cls)
    assert text is not None
    for field in dataclasses.fields(cls):
        if not field.name.startswith("_"):
            _, found, after = text.partition(f"\n    {field.name}:\n        ")
            assert found, field.name
            assert after.split("\n")[0] in shown
