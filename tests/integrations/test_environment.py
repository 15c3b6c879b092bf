"""What the tests of this folder stand on: which warnings count, and that every peer imports where peers are
required."""

from __future__ import annotations

import importlib
import os
import warnings

import pytest

PEERS = [
    "accelerate",
    "areal",
    "lightning",
    "openrlhf",
    "tensordict",
    "transfer_queue",
    "trl",
    "verl.protocol",
]


@pytest.mark.skipif(
    os.environ.get("STREAM_BALANCER_REQUIRE_PEERS") != "1", reason="`make test-integrations` has the peers"
)
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_does_not_import_is_a_failure(name: str) -> None:
    assert importlib.import_module(name)


def test_warnings_of_others_are_quiet_and_ours_are_errors() -> None:
    warnings.warn_explicit("theirs", UserWarning, "theirs.py", 1, module="verl.protocol")
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn_explicit("ours", UserWarning, "ours.py", 1, module="stream_balancer.integrations.verl")
