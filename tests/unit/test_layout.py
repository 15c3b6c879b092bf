"""Packed, padded and nested hold the same tokens, and only those."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stream_balancer as sb

lengths_lists = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def micro_batch(lengths: list[int], **extra: torch.Tensor) -> sb.MicroBatch:
    start, rollouts = 1, []
    for n in lengths:
        ids = torch.arange(start, start + n)
        rollouts.append(
            sb.Rollout(tokens={"input_ids": ids, "h": ids[:, None] * torch.ones(1, 2)}, scalars={"advantage": float(n)})
        )
        start += n
    return sb.MicroBatch.of(rollouts)


@given(lengths_lists)
def test_packed(lengths: list[int]) -> None:
    packed = micro_batch(lengths).packed()
    total = sum(lengths)
    assert packed["input_ids"].tolist() == list(range(1, total + 1))
    assert packed["h"].shape == (total, 2)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.diff().tolist() == lengths
    assert packed.max_seqlen == max(lengths)
    assert packed.position_ids.tolist() == [i for n in lengths for i in range(n)]
    assert packed["advantage"].tolist() == [float(n) for n in lengths]
    assert packed["loss_mask"].tolist() == [True] * total


@given(lengths_lists, st.sampled_from(["left", "right"]), st.integers(1, 4))
def test_padded(lengths: list[int], side: str, multiple_of: int) -> None:
    mb = micro_batch(lengths)
    padded = mb.padded(padding_side=side, pad_values={"input_ids": -7}, multiple_of=multiple_of)  # type: ignore[arg-type]
    width = padded["input_ids"].shape[1]
    assert width % multiple_of == 0
    assert 0 <= width - max(lengths) < multiple_of
    start = 1
    for row, n in enumerate(lengths):
        real = slice(0, n) if side == "right" else slice(width - n, width)
        assert padded["input_ids"][row, real].tolist() == list(range(start, start + n))
        assert padded.position_ids[row, real].tolist() == list(range(n))
        assert int(padded.attention_mask[row].sum()) == n
        assert (padded["input_ids"][row][~padded.attention_mask[row]] == -7).all()
        assert (padded["h"][row][~padded.attention_mask[row]] == 0).all()
        start += n


@given(lengths_lists)
def test_nested(lengths: list[int]) -> None:
    mb = micro_batch(lengths)
    nested = mb.nested()
    parts = nested["input_ids"].unbind()
    assert [p.tolist() for p in parts] == [r.tokens["input_ids"].tolist() for r in mb.rollouts]
    assert nested.offsets.diff().tolist() == lengths


def test_own_position_ids_win() -> None:
    rollout = sb.Rollout(tokens={"input_ids": [1, 2], "position_ids": [7, 8]})
    mb = sb.MicroBatch.of([rollout])
    assert mb.packed().position_ids.tolist() == [7, 8]
    assert mb.padded().position_ids.tolist() == [[7, 8]]


def test_mapping_names_columns_and_scalars() -> None:
    packed = micro_batch([1, 2]).packed()
    assert set(packed) == {"input_ids", "h", "loss_mask", "advantage"}
    assert len(packed) == 4
    with pytest.raises(KeyError, match="no column or scalar 'rewards'; columns: "):
        packed["rewards"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"padding_side": "top"}, "padding_side must be"),
        ({"multiple_of": 0}, "multiple_of must be"),
        ({"pad_values": {"ids": 1}}, r"pad_values names \['ids'\]"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        micro_batch([1]).padded(**arguments)  # type: ignore[arg-type]


def test_tensordict_says_what_to_install_or_works() -> None:
    try:
        import tensordict  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"stream-balancer\[tensordict\]"):
            micro_batch([1, 2]).tensordict()
    else:
        assert micro_batch([1, 2]).tensordict().batch_size == torch.Size([2])


LAYOUTS = ["packed", "padded", "nested"]


def numbers(layout: str, **options: torch.dtype) -> dict[str, torch.Tensor]:
    """Scalars of two rollouts in a layout."""
    rollouts = [
        sb.Rollout(tokens={"input_ids": [1, 2]}, scalars={"reward": 0.1 * n, "seed": 2**53 + n, "won": n == 1})
        for n in (1, 2)
    ]
    found: dict[str, torch.Tensor] = getattr(sb.MicroBatch.of(rollouts), layout)(**options).scalars
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scalar_does_not_turn_a_float32_loss_into_float64(layout: str) -> None:
    scalars = numbers(layout)
    assert {scalar.dtype for scalar in scalars.values()} == {torch.float32}
    assert (torch.ones(2, requires_grad=True) * scalars["reward"]).sum().dtype is torch.float32
    assert scalars["reward"].tolist() == torch.tensor([0.1, 0.2]).tolist()
    assert scalars["won"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scalars_may_be_asked_for_in_another_dtype(layout: str) -> None:
    assert numbers(layout, scalar_dtype=torch.float64)["reward"].tolist() == [0.1, 0.2]
    assert numbers(layout, scalar_dtype=torch.int64)["seed"].tolist() == [2**53 + 1, 2**53 + 2]
