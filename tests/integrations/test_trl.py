"""GRPO's dict and the async trainer's data path, against the real package."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from any_rollouts import DTYPES, column
from guard import GUARD_S
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import rank_batch
from their_own_tests import patched
from two_ranks import HERE, torchrun

import stream_balancer as sb
from stream_balancer.integrations.trl import (
    BalancedGRPO,
    RolloutSource,
    inputs_from,
    patch,
    rollouts_from,
    rollouts_from_samples,
)

pytest.importorskip("trl")

import trl_tiny
from accelerate import Accelerator
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.trainer.utils import pad, split_pixel_values_by_grid, unsplit_pixel_values_by_grid

PAD = 99


@st.composite
def grpo_inputs(draw: Any) -> dict[str, Any]:
    """What ``GRPOTrainer._generate_and_score_completions`` returns, padded by TRL's own function."""
    count = draw(st.integers(1, 5))
    prompts = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    completions = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    long, wide = max(completions), max(prompts)

    def rows(lengths: list[int], dtype: torch.dtype, side: str, value: float = 0) -> torch.Tensor:
        return pad([column(draw, (n,), dtype) for n in lengths], padding_value=value, padding_side=side)

    def ones(lengths: list[int], side: str) -> torch.Tensor:
        return pad([torch.ones(n, dtype=torch.long) for n in lengths], padding_value=0, padding_side=side)

    inputs: dict[str, Any] = {
        "prompt_ids": rows(prompts, torch.int64, "left", PAD),
        "prompt_mask": ones(prompts, "left"),
        "completion_ids": rows(completions, torch.int64, "right", PAD),
        "completion_mask": ones(completions, "right"),
        "advantages": column(draw, (count,), torch.float32) / 7,
    }
    loss_mask = inputs["completion_mask"]
    if draw(st.booleans()):
        tools = [torch.randint(0, 2, (n,)) for n in completions]
        inputs["tool_mask"] = pad(tools, padding_value=1, padding_side="right")
        loss_mask = loss_mask * inputs["tool_mask"]
    for name in draw(st.sets(st.sampled_from(["old_per_token_logps", "sampling_per_token_logps", "other"]))):
        dtype = torch.float32 if name != "other" else draw(st.sampled_from(DTYPES))
        inputs[name] = rows(completions, dtype, "right")
    if draw(st.booleans()) and wide:
        types = [column(draw, (p + c,), torch.int64) for p, c in zip(prompts, completions, strict=True)]
        inputs["token_type_ids"] = torch.zeros(count, wide + long, dtype=torch.int64)
        for row, (p, c, one) in enumerate(zip(prompts, completions, types, strict=True)):
            inputs["token_type_ids"][row, wide - p : wide + c] = one
    if draw(st.booleans()) and long != 1 and wide + long != 1:
        inputs["importance_sampling_ratio"] = column(draw, (count, 1), torch.float32)
    if draw(st.booleans()):
        images = [draw(st.integers(1, 2)) for _ in prompts]
        grid = torch.tensor([[1, 2, draw(st.integers(1, 3))] for _ in range(sum(images))])
        inputs |= {"num_images": images, "image_grid_thw": grid}
        inputs["pixel_values"] = column(draw, (int(grid.prod(-1).sum()), 4), torch.bfloat16)
    inputs["num_items_in_batch"] = loss_mask.sum()
    return inputs


@given(grpo_inputs())
@settings(max_examples=80)
def test_every_entry_survives(inputs: dict[str, Any]) -> None:
    made = rollouts_from(split_pixel_values_by_grid(inputs), version=4)
    (back,) = inputs_from(rank_batch(made), pad_token_id=PAD)
    back = unsplit_pixel_values_by_grid(back)
    assert back.keys() == inputs.keys()
    for key, value in inputs.items():
        if isinstance(value, list):
            assert back[key] == value
        else:
            assert back[key].dtype == value.dtype, key
            assert torch.equal(back[key], value), (key, value, back[key])
    assert {rollout.version for rollout in made} == {4}


def two_rows() -> dict[str, Any]:
    return {
        "prompt_ids": torch.tensor([[PAD, 1], [2, 3]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[4, 5, 6], [7, PAD, PAD]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]]),
        "advantages": torch.tensor([0.5, -0.5]),
        "num_items_in_batch": torch.tensor(3),
    }


def test_what_a_rollout_is() -> None:
    first, second = rollouts_from(two_rows(), group_size=2)
    assert (first.tokens["input_ids"].tolist(), first.tokens["loss_mask"].tolist()) == ([1, 4, 5, 6], [0, 1, 0, 1])
    assert second.tokens["input_ids"].tolist() == [2, 3, 7]
    assert (first.scalars["advantages"], second.scalars["advantages"]) == (0.5, -0.5)
    assert first.group_id == second.group_id is not None
    assert first.rollout_id != second.rollout_id


def test_a_truncated_completion_trains_nothing() -> None:
    inputs = two_rows()
    inputs["completion_mask"][1] = inputs["tool_mask"][1] = 0  # mask_truncated_completions
    made = rollouts_from(inputs)
    assert made[1].tokens["input_ids"].tolist() == [2, 3]
    assert made[1].num_loss_tokens == 0
    (back,) = inputs_from(rank_batch(made), pad_token_id=PAD)
    assert torch.equal(back["completion_mask"], inputs["completion_mask"])
    (alone,) = inputs_from(rank_batch(made[1:]), pad_token_id=PAD)
    assert (alone["completion_ids"].tolist(), alone["completion_mask"].tolist()) == ([[PAD]], [[0]])
    assert alone["tool_mask"].shape == (1, 1)


def test_a_padding_copy_trains_nothing_and_the_denominator_is_the_steps() -> None:
    made = rollouts_from(two_rows())
    one, other = inputs_from(rank_batch([made[0]], [made[1].padding_copy("p")]), pad_token_id=PAD)
    assert one["completion_mask"].sum() == 3
    assert other["completion_mask"].sum() == 0
    assert other["prompt_ids"].shape == other["completion_ids"].shape == (1, 1)  # one scores the other
    assert other["prompt_mask"].tolist() == [[1]]
    assert one["num_items_in_batch"] == other["num_items_in_batch"] == made[0].num_loss_tokens == 2


@given(grpo_inputs(), st.integers(0, 7))
@settings(max_examples=40)
def test_padded_prompts_count_and_come_off_again(inputs: dict[str, Any], extra: int) -> None:
    length = int(inputs["prompt_mask"].sum(1).max()) + extra
    split = split_pixel_values_by_grid(inputs)
    made = rollouts_from(split, prompt_length=length)
    tokens = inputs["completion_mask"].sum(1) + length
    assert [rollout.num_tokens for rollout in made] == tokens.tolist()
    (back,) = inputs_from(rank_batch(made), pad_token_id=PAD)
    assert torch.equal(back["prompt_ids"], inputs["prompt_ids"])
    assert torch.equal(back["completion_mask"], inputs["completion_mask"])
    with pytest.raises(ValueError, match=rf"a prompt has {length - extra} tokens, and prompt_length is"):
        rollouts_from(split, prompt_length=length - extra - 1)


def test_the_cap_bounds_what_is_padded_where_prompts_are_padded_too() -> None:
    """Prompts and completions are padded apart: a long prompt beside a long completion is wider than either row."""
    inputs = two_rows() | {
        "prompt_ids": torch.tensor([[PAD] * 8 + [1], list(range(1, 10))]),
        "prompt_mask": torch.tensor([[0] * 8 + [1], [1] * 9]),
    }
    rows = [rollout.num_tokens for rollout in rollouts_from(inputs)]
    padded = [rollout.num_tokens for rollout in rollouts_from(inputs, prompt_length=9)]
    (back,) = inputs_from(rank_batch(rollouts_from(inputs, prompt_length=9)), pad_token_id=PAD)
    width = back["prompt_ids"].shape[1] + back["completion_ids"].shape[1]
    assert max(rows) < width <= max(padded)


# --- GRPOTrainer ------------------------------------------------------------------------------------------------------


LOSS_TYPES = ("dapo", "grpo", "cispo", "vespo", "sapo", "dr_grpo", "luspo", "bnpo")


@pytest.mark.slow
def test_grpo_stays_on_trls_own_course_for_thirty_steps(tmp_path: Path) -> None:
    found = torchrun(HERE / "trl_grpo_rank.py", tmp_path, "30", "dapo", "grpo")
    assert max(found["gradients_apart"].values()) < 1e-5, found


def test_grpo_trains_on_two_ranks_with_trls_own_gradient(tmp_path: Path) -> None:
    """Every loss type; see trl_grpo_rank.py."""
    found = torchrun(HERE / "trl_grpo_rank.py", tmp_path, "2", *LOSS_TYPES)
    assert set(found["gradients_apart"]) == set(LOSS_TYPES)
    assert max(found["gradients_apart"].values()) < 1e-5, found
    theirs, ours = found["theirs"], found["ours"]
    assert [sum(rows for rows, _ in rank) for rank in theirs] == [24, 24]
    assert sum(rows for rank in ours for rows, _ in rank) >= 48  # padding copies are rows
    assert len(ours[0]) == len(ours[1])
    assert any(one[0] != other[0] for one, other in zip(*ours, strict=True))  # what TRL could not gather
    assert max(tokens for rank in ours for _, tokens in rank) <= 300
    assert padded(ours) < 0.9 * padded(theirs)
    assert lockstep(ours) < 0.9 * lockstep(theirs)
    assert found["generations_for_four_steps"] == 2
    assert max(found["gradients_apart_in_a_generation"].values()) < 1e-5, found


def padded(ranks: list[list[tuple[int, int]]]) -> int:
    """Tokens run through the model, padding counted."""
    return sum(tokens for rank in ranks for _, tokens in rank)


def lockstep(ranks: list[list[tuple[int, int]]]) -> int:
    """The same of the heavier rank at each micro-batch, where ranks meet."""
    return sum(max(tokens for _, tokens in place) for place in zip(*ranks, strict=True))


def test_the_recipe_works_pasted(tmp_path: Path) -> None:
    model = trl_tiny.saved_model(tmp_path / "model")
    recipe = trl_tiny.recipe(
        0,
        {
            "from datasets import load_dataset": "import trl_tiny",
            "from trl.rewards import accuracy_reward\n": "",
            '"Qwen/Qwen3-0.6B"': repr(model),
            'GRPOConfig(output_dir="out", max_steps=100)': "GRPOConfig("
            f"output_dir={str(tmp_path)!r}, max_steps=2, max_completion_length=24, **trl_tiny.COMMON)",
            "accuracy_reward,": "trl_tiny.length_reward, processing_class=trl_tiny.tokenizer(),",
            'load_dataset("trl-lib/DeepMath-103K", split="train")': "trl_tiny.prompts()",
        },
    )
    program = tmp_path / "train.py"
    program.write_text(f"{recipe}\nassert trainer.state.global_step == 2\nfrom two_ranks import leave\nleave()\n")
    torchrun(program)


class Trainer(BalancedGRPO, GRPOTrainer):
    pass


def grpo(folder: Path, **options: Any) -> Trainer:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
    args = GRPOConfig(output_dir=str(folder), max_completion_length=8, max_steps=2, **trl_tiny.COMMON | sizes | options)
    return Trainer(
        trl_tiny.saved_model(folder / "model"),
        reward_funcs=trl_tiny.length_reward,
        args=args,
        train_dataset=trl_tiny.prompts(),
        processing_class=trl_tiny.tokenizer(),
    )


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_grpo_trains_in_one_process_and_evaluates(tmp_path: Path, loss_type: str) -> None:
    """Also where truncated completions fill a micro-batch, which then trains nothing."""
    trainer = grpo(tmp_path, mask_truncated_completions=True, loss_type=loss_type)
    trainer.eval_dataset = trl_tiny.prompts(8)
    with trainer.balanced(micro_batches=sb.MicroBatches(max_tokens=30)):
        done = trainer.train()
        assert done.global_step == 2
        assert math.isfinite(done.training_loss)
        assert math.isfinite(trainer.evaluate()["eval_loss"])


CAP = sb.MicroBatches(max_tokens=60)
FREE = {"micro_batches": sb.MicroBatches(equal_number=False), "sync": "step", "cost": sb.cost.TokenCost()}


def test_what_cannot_be_balanced_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = grpo(tmp_path)
    with pytest.raises(RuntimeError, match=r"with trainer.balanced\(...\): trainer.train\(\)"):
        trainer.train()
    for changes, knobs, says in (
        ({"num_iterations": 2}, {}, "num_iterations must be 1, not 2"),
        ({"args.steps_per_generation": 3}, {}, r"steps_per_generation \(3\) must be a multiple"),
        ({"top_entropy_quantile": 0.2}, {}, "top_entropy_quantile .* which rollouts share a micro-batch"),
        ({"entropy_coef": 0.01}, {}, "entropy_coef .* which rollouts share a micro-batch"),
        ({"use_adaptive_entropy": True}, {}, "use_adaptive_entropy .* which rollouts share a micro-batch"),
        ({"aux_loss_enabled": True}, {}, "router_aux_loss_coef .* which rollouts share a micro-batch"),
        ({"loss_type": "newest"}, {}, "loss_type='newest' is not known"),
        ({}, {"cost": sb.cost.TokenCost(), "micro_batches": CAP}, "does not count padding"),
        ({}, FREE, r"leave micro_batches\.equal_number"),
    ):
        with monkeypatch.context() as patched:
            for path, value in changes.items():
                *owner, name = path.split(".")
                patched.setattr(trainer.args if owner else trainer, name, value)
            with pytest.raises(ValueError, match=says), trainer.balanced(**knobs):
                pass


# --- the async trainer ------------------------------------------------------------------------------------------------


def sample(number: int, length: int, group: int) -> RolloutSample:
    mask = np.ones(length, dtype=np.int64)
    mask[:1] = 0
    return RolloutSample(
        prompt=[{"role": "user", "content": "?"}],
        completion=[{"role": "assistant", "content": "!"}],
        input_ids=np.arange(length) + 1000 * number,
        completion_mask=mask,
        old_log_probs=np.full(length, -0.5, dtype=np.float32),
        advantage=number / 8,
        model_version=0,
        group_id=group,
        metrics={"reward": float(number)},
    )


def trainer_of(source: Any, num_processes: int, **args: Any) -> Any:
    """What the real ``get_train_dataloader`` reads of its trainer."""
    return SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=num_processes, is_main_process=True, prepare=lambda loader: loader),
        rollout_queue=source.rollout_buffer,
        rollout_worker=source,
        model_version=0,
        args=SimpleNamespace(
            heartbeat_stale_after_s=1, max_staleness=3, report_to=[], per_device_train_batch_size=2, **args
        ),
        _metrics={"train": async_grpo_trainer.defaultdict(list)},
        _trained_groups=set(),
        add_callback=lambda _: None,
        processing_class=SimpleNamespace(pad_token_id=0),
    )


LENGTHS = [2, 9, 3, 4, 8, 2, 5, 7, 3, 6, 2, 9, 4, 4, 3, 5]


@pytest.mark.parametrize("token_budget", [0, 20])
def test_the_real_loader_and_collator_train_on_our_plan(token_budget: int) -> None:
    cap = token_budget or None
    config = sb.BalancerConfig(
        dp_size=2, batch_size=8, window=16, micro_batches=sb.MicroBatches(max_tokens=cap), sync="micro_batch"
    )
    with patched(patch), sb.blocking(config) as balancer:
        source = RolloutSource(balancer, SimpleNamespace(gradient_accumulation_steps=1))
        for rollout in rollouts_from_samples(sample(n, length, n // 2) for n, length in enumerate(LENGTHS)):
            balancer.put(rollout)
        balancer.end()
        trainer = trainer_of(source, 2, token_budget=token_budget)
        batches = list(async_grpo_trainer.AsyncGRPOTrainer.get_train_dataloader(trainer))
        source.update_model_version(1)
        assert balancer.statistics().version == 1
        assert source.rollout_buffer.qsize() == 0
        source.stop()
    trained = [label for batch in batches for row in batch["shift_labels"].tolist() for label in row if label != -100]
    assert sorted(trained) == sorted(1000 * n + i for n, length in enumerate(LENGTHS) for i in range(1, length))
    assert all(batch["input_ids"].shape[0] == 2 for batch in batches)
    assert all(batch["input_ids"].shape[1] <= (token_budget or 1000) for batch in batches)
    assert trainer._trained_groups == set(range(8))
    assert math.isclose(sum(float(b["global_n_tokens"][0]) for b in batches), sum(LENGTHS) - len(LENGTHS))
    assert len(trainer._metrics["train"]["batch/row_imbalance"]) == len(batches)


def test_async_grpo_trains_on_two_ranks_and_ends_with_the_stream(tmp_path: Path) -> None:
    """With TRL's own gradient, a rank of padding copies alone included; see trl_async_rank.py."""
    found = torchrun(HERE / "trl_async_rank.py", tmp_path)
    assert found["steps"] == 3
    assert found["gradients_apart"] < 1e-5
    assert found["acknowledged"] == [0, 1, 2]


def test_other_workers_are_planned_by_trl_as_before_and_a_forgotten_patch_is_said() -> None:
    def patched() -> tuple[Any, ...]:
        home, method = async_grpo_trainer, async_grpo_trainer.AsyncGRPOTrainer.get_train_dataloader
        return home.TokenBudgetBatcher, home.FixedCountBatcher, home.DataCollatorForRollout, method

    originals = patched()
    put_back = patch()
    dataset = SimpleNamespace(queue=object())
    assert not {*originals} & {*patched()}
    assert isinstance(async_grpo_trainer.FixedCountBatcher(dataset, 2, 4), originals[1])
    assert isinstance(async_grpo_trainer.TokenBudgetBatcher(dataset, 2, 4, {}), originals[0])
    put_back()
    assert originals == patched()
    with sb.blocking(sb.BalancerConfig(dp_size=2, batch_size=8)) as balancer:
        source = RolloutSource(balancer, SimpleNamespace(gradient_accumulation_steps=1))
        loader = async_grpo_trainer.AsyncGRPOTrainer.get_train_dataloader(trainer_of(source, 2, token_budget=0))
        with pytest.raises(RuntimeError, match=r"call stream_balancer.integrations.trl.patch\(\) before the trainer"):
            next(iter(loader))
        with pytest.raises(ValueError, match="balances for dp_size=2, but TRL trains on 3 processes"):
            next(source.micro_batches(3))


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_a_step_is_acknowledged_with_the_optimizer_step_that_has_the_last_of_it(accumulation: int) -> None:
    """Under accelerate's real loader, which looks one ahead, fetched as transformers' Trainer does: a whole
    accumulation before any of it is trained."""
    config = sb.BalancerConfig(
        dp_size=1, batch_size=2, window=2, micro_batches=sb.MicroBatches(max_tokens=9), sync="step"
    )
    steps: dict[int, int] = {}
    trained: set[int] = set()
    of_micro_batches: list[int] = []
    acknowledged: list[int] = []
    with sb.blocking(config) as balancer:
        source = RolloutSource(balancer, SimpleNamespace(gradient_accumulation_steps=accumulation))

        def put() -> None:
            for rollout in rollouts_from_samples(sample(n, length, n) for n, length in enumerate(LENGTHS)):
                balancer.put(rollout)
            balancer.end()

        producer = threading.Thread(target=put, daemon=True)
        producer.start()
        acknowledge = balancer.acknowledge

        def watched(step: int) -> None:
            assert [n for n, of in steps.items() if of == step and n not in trained] == [], step
            acknowledged.append(step)
            acknowledge(step)

        batches = balancer.batches

        def noted(**options: Any) -> Any:
            for batch in batches(**options):
                for rollout in batch.rollouts:
                    steps[int(rollout.tokens["input_ids"][0]) // 1000] = batch.step
                yield batch

        balancer.acknowledge, balancer.batches = watched, noted  # type: ignore[method-assign]
        with patched(patch):
            loader = async_grpo_trainer.AsyncGRPOTrainer.get_train_dataloader(trainer_of(source, 1, token_budget=0))
        batches_of_trainer = iter(Accelerator(cpu=True).prepare(loader))
        while chunk := [one for one in (next(batches_of_trainer, None) for _ in range(accumulation)) if one]:
            for batch in chunk:
                rollouts = {label // 1000 for label in batch["shift_labels"].flatten().tolist() if label >= 0}
                trained |= rollouts
                of_micro_batches += {steps[rollout] for rollout in rollouts}
            if len(chunk) == accumulation:  # else the trainer does not step
                source.stepped()
        producer.join(GUARD_S)
        assert not producer.is_alive()
        assert trained == set(range(len(LENGTHS)))
        whole = len(of_micro_batches) // accumulation * accumulation
        assert acknowledged == sorted({*of_micro_batches[:whole]} - {*of_micro_batches[whole:]})
