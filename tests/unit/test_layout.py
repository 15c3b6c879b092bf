"""Packed, padded, nested hold the same tokens, and only those."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stream_balancer as sb

lengths_lists = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def numbered(lengths: list[int], **extra: torch.Tensor) -> sb.rollouts.MicroBatch:
    start, rollouts = 1, []
    for n in lengths:
        ids = torch.arange(start, start + n)
        rollouts.append(
            sb.Rollout(tokens={"input_ids": ids, "h": ids[:, None] * torch.ones(1, 2)}, scalars={"advantage": float(n)})
        )
        start += n
    return sb.rollouts.MicroBatch.of(rollouts)


@given(lengths_lists)
def test_packed(lengths: list[int]) -> None:
    packed = numbered(lengths).packed()
    total = sum(lengths)
    assert packed["input_ids"].tolist() == list(range(1, total + 1))
    assert packed["h"].shape == (total, 2)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.diff().tolist() == lengths
    assert packed.max_seqlen == max(lengths)
    assert packed.position_ids.tolist() == [i for n in lengths for i in range(n)]
    assert packed["advantage"].tolist() == [float(n) for n in lengths]
    assert packed["loss_mask"].tolist() == [i > 0 for n in lengths for i in range(n)]


@pytest.mark.parametrize("mask", [None, [1, 1, 1], [0, 1, 1], [0, 0, 1]])
def test_a_shifted_loss_is_that_of_each_sequence_by_itself(mask: list[int] | None) -> None:
    """A rollout's first token is predicted from nothing: neither summed, nor counted."""
    logits = torch.randn(50, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rollouts = []
    for number, length in enumerate((7, 2, 1, 12)):
        tokens = {"input_ids": torch.randint(50, (length,), generator=torch.Generator().manual_seed(number))}
        tokens["logprobs"] = torch.arange(length, dtype=torch.float64) + number
        if mask is not None:
            tokens["loss_mask"] = torch.tensor((mask * length)[:length])
        rollouts.append(sb.Rollout(tokens=tokens, scalars={"advantage": 0.5 + number}))
    expected, count = torch.zeros((), dtype=torch.float64), 0
    for rollout in rollouts:
        ids, trained = rollout.tokens["input_ids"], rollout.tokens.get("loss_mask", torch.ones(rollout.num_tokens))[1:]
        logprobs = logits.log_softmax(-1)[ids[:-1], ids[1:]] - rollout.tokens["logprobs"][1:]
        expected += (logprobs * trained).sum() * rollout.scalars["advantage"]
        count += int(trained.count_nonzero())
    packed = sb.rollouts.MicroBatch.of(rollouts).packed(shift=True)
    logprobs = logits.log_softmax(-1)[packed["input_ids"], packed["targets"]] - packed["logprobs"]
    weights = packed.per_token("advantage") * packed["loss_mask"]
    torch.testing.assert_close((logprobs * weights).sum(), expected)
    trained_on = int(packed["loss_mask"].count_nonzero())
    assert sum(rollout.num_loss_tokens for rollout in rollouts) == trained_on == count


@given(lengths_lists, st.sampled_from(["left", "right"]), st.integers(1, 4))
def test_padded(lengths: list[int], side: str, multiple_of: int) -> None:
    mb = numbered(lengths)
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
    mb = numbered(lengths)
    nested = mb.nested()
    parts = nested["input_ids"].unbind()
    assert [p.tolist() for p in parts] == [r.tokens["input_ids"].tolist() for r in mb.rollouts]
    assert nested.offsets.diff().tolist() == lengths


def test_tensordict_says_what_to_install_or_works() -> None:
    try:
        import tensordict  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"stream-balancer\[tensordict\]"):
            numbered([1, 2]).tensordict()
    else:
        assert numbered([1, 2]).tensordict().batch_size == torch.Size([2])


LAYOUTS = ["packed", "padded", "nested"]


def numbers(layout: str, **options: torch.dtype) -> dict[str, torch.Tensor]:
    """Scalars of two rollouts in a layout."""
    rollouts = [
        sb.Rollout(tokens={"input_ids": [1, 2]}, scalars={"reward": 0.1 * n, "seed": 2**53 + n, "won": n == 1})
        for n in (1, 2)
    ]
    found: dict[str, torch.Tensor] = getattr(sb.rollouts.MicroBatch.of(rollouts), layout)(**options).scalars
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scalar_does_not_turn_a_float32_loss_into_float64(layout: str) -> None:
    scalars = numbers(layout)
    assert {scalar.dtype for scalar in scalars.values()} == {torch.float32}
    assert (torch.ones(2, requires_grad=True) * scalars["reward"]).sum().dtype is torch.float32
    assert scalars["reward"].tolist() == torch.tensor([0.1, 0.2]).tolist()
    assert scalars["won"].tolist() == [1.0, 0.0]


def spread_out(layout: str, name_or_values: str | torch.Tensor, rollouts: list[sb.Rollout]) -> list[list[float]]:
    """Rollout by rollout, [n][L], whatever the layout; what lies on padding must be zero."""
    laid_out = getattr(sb.rollouts.MicroBatch.of(rollouts), layout)()
    found = laid_out.per_token(name_or_values)
    assert found.shape == laid_out["input_ids"].shape or layout == "nested"
    if layout == "packed":
        return [part.tolist() for part in found.split([r.num_tokens for r in rollouts])]
    if layout == "padded":
        assert not found[~laid_out.attention_mask].any()
        return [row[mask].tolist() for row, mask in zip(found, laid_out.attention_mask, strict=True)]
    assert torch.equal((found + laid_out["input_ids"]).offsets(), laid_out.offsets)  # torch takes their shapes for one
    return [part.tolist() for part in found.unbind()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_number_of_each_rollout_is_spread_over_its_tokens(layout: str) -> None:
    rollouts = [sb.Rollout(tokens={"input_ids": range(n)}, scalars={"advantage": n / 2}) for n in (2, 3, 1)]
    assert spread_out(layout, "advantage", rollouts) == [[1.0, 1.0], [1.5, 1.5, 1.5], [0.5]]
    normalised = torch.tensor([7, 8, 9])
    assert spread_out(layout, normalised, rollouts) == [[7, 7], [8, 8, 8], [9]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [2.0, float("inf")])
def test_what_is_spread_is_zero_on_padding_copies(layout: str, value: float) -> None:
    real = sb.Rollout(tokens={"input_ids": [1, 2]}, scalars={"advantage": 1.0})
    copied = sb.Rollout(tokens={"input_ids": [1, 2]}, scalars={"advantage": value})
    assert spread_out(layout, "advantage", [real, copied.padding_copy("p")]) == [[1.0, 1.0], [0.0]]


def test_a_column_of_ones_own_called_targets_is_not_lost_in_the_shift() -> None:
    ids = torch.arange(3)
    held = sb.rollouts.MicroBatch.of([sb.Rollout(tokens={"input_ids": ids, "targets": ids + 7})])
    assert held.packed()["targets"].tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match=r"shift=True.*'targets'"):
        held.packed(shift=True)
