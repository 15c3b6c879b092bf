"""GRPOTrainer on a balancer: what the ranks generated is dealt to them anew, and cut into micro-batches under a cap.

::

    class Trainer(BalancedGRPO, GRPOTrainer):
        pass

    trainer = Trainer(model, args=args, reward_funcs=reward, train_dataset=data)      # args as they are
    with trainer.balanced(micro_batches=sb.MicroBatches(max_tokens=32_768)):
        trainer.train()

Each optimizer step divides by the numbers that TRL divides by, and trains on the same rollouts (of a generation for
several steps, on those that balance); which rank runs them, and with which neighbours, is ours. The hooks are
``training_step`` (it runs a rank batch's micro-batches), ``_prepare_inputs`` (they are prepared already) and
``compute_loss`` (their weight in the step).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any, NamedTuple

import torch

import stream_balancer as sb
from stream_balancer.integrations.trl.rows import inputs_from, rollouts_from

_MEANS_OVER_TOKENS = ("bnpo", "cispo", "dapo", "vespo")
_MEANS_OVER_ROWS = ("dr_grpo", "grpo", "luspo", "sapo")
_WEIGHT = "weight_in_the_step"
_blocks = count()


class _Link(NamedTuple):
    """A rank's two ends of the balancer."""

    put: Callable[[sb.Rollout], None]
    next: Callable[[], Any]
    end: Callable[[], None]


_Trainer: Any = object  # what this is mixed into; TRL is imported by whoever does that


class BalancedGRPO(_Trainer):  # type: ignore[misc]
    """``class Trainer(BalancedGRPO, GRPOTrainer)``: trains inside ``with trainer.balanced(...)``.

    Loss types: ``grpo``, ``dr_grpo``, ``sapo`` and ``luspo`` are the mean over the step's rollouts, ``dapo``, ``cispo``
    and ``vespo`` over its loss tokens, as with TRL. ``bnpo``, which TRL divides by the tokens of whatever micro-batch a
    rollout is in, is the mean over the step's tokens too. ``per_device_train_batch_size`` says how many rollouts a rank
    generates for a step; how many rows a micro-batch has, and how many there are, is the balancer's plan.

    Every rank runs as many micro-batches, but with different numbers of rows: what TRL gathers of them for its metrics
    is padded first.
    """

    _step: int
    _link: _Link | None = None
    _inputs: list[dict[str, Any]]
    _calls = 0  # of training_step, since the optimizer stepped
    _generated_tokens = 0  # loss tokens of all ranks' last generation

    @contextmanager
    def balanced(self, **knobs: Any) -> Iterator[None]:
        """Train on the balancer's plan inside. Every process enters it; the main one hosts the balancer, in the store
        of the torch.distributed world.

        ``knobs`` of :class:`~stream_balancer.BalancerConfig`; ``dp_size``, ``batch_size`` and ``window`` (one step's
        rollouts) follow from the trainer's arguments, and ``cost`` is ``PaddedCost()``, so that
        ``micro_batches.max_tokens`` bounds rows x (longest prompt + longest completion). Raises ValueError for
        arguments that cannot be balanced.
        """
        config = sb.BalancerConfig(**self._usual_knobs() | knobs)
        self._check(config)
        with ExitStack() as stack:
            self._link = self._connected(stack, config)
            stack.callback(setattr, self, "_link", None)
            yield
            self._link.end()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """A call of those that make an optimizer step: generates where TRL generates, and runs this call's part of the
        rank batch's micro-batches."""
        if self._link is None:
            raise RuntimeError("train inside the block: with trainer.balanced(...): trainer.train()")
        step, calls = self._step, self.current_gradient_accumulation_steps
        if step % self.args.steps_per_generation == 0:
            scored = self._generate_and_score_completions(inputs)
            self._generated_tokens = int(scored["num_items_in_batch"])
            for rollout in self._rollouts(scored):
                self._link.put(rollout)
        if self._calls == 0:
            self._inputs = self._weighted(self._link.next(), calls)
        step_times = self._metrics["train"]["step_time"]
        noted = len(step_times)
        first, end = (len(self._inputs) * call // calls for call in (self._calls, self._calls + 1))
        self._calls = (self._calls + 1) % calls
        loss = torch.zeros((), device=self.accelerator.device)
        for place in range(first, end):
            self._step = step  # TRL counts its calls, not ours
            # DDP reduces once a call: only its last micro-batch may synchronise
            with self._gradients_to_come(model) if place + 1 < end else nullcontext():
                loss += super().training_step(model, self._inputs[place], num_items_in_batch)
        self._step = step + 1
        # TRL notes a time a call, and ran several times in this one
        step_times[noted:] = [sum(step_times[noted:])] if len(step_times) > noted else []
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> torch.Tensor:
        """TRL's mean over a micro-batch, times its weight in the step."""
        weight = inputs.pop(_WEIGHT, 1.0)
        with _gathering_ragged(self.accelerator):
            loss: torch.Tensor = weight * super().compute_loss(model, inputs, *args, **options)
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        if not isinstance(inputs, dict):
            return super()._prepare_inputs(inputs)  # evaluation: prompts
        from accelerate.utils import send_to_device
        from trl.trainer.utils import unsplit_pixel_values_by_grid

        return send_to_device(unsplit_pixel_values_by_grid(inputs), self.accelerator.device)

    # --- the balancer -------------------------------------------------------------------------------------------------

    def _usual_knobs(self) -> dict[str, Any]:
        ranks, per_step = self.accelerator.num_processes, self.args.per_device_train_batch_size
        of_step = ranks * per_step * self.args.gradient_accumulation_steps
        return {
            "dp_size": ranks,
            "batch_size": of_step,
            "window": of_step,  # TRL generates the next when this step is done: there is nothing more to wait for
            # the next generation is put while the last step is not acknowledged yet
            "capacity": 2 * max(of_step, self.args.generation_batch_size),
            "sync": "micro_batch",  # TRL's metrics are collectives
            "cost": sb.cost.PaddedCost(),
        }

    def _check(self, config: sb.BalancerConfig) -> None:
        if self.loss_type not in _MEANS_OVER_TOKENS + _MEANS_OVER_ROWS:
            raise ValueError(
                f"loss_type={self.loss_type!r} is not known here, so the weight of a micro-batch is not: use one of "
                f"{sorted(_MEANS_OVER_TOKENS + _MEANS_OVER_ROWS)}"
            )
        by_micro_batch = {
            "top_entropy_quantile": self.top_entropy_quantile < 1.0,
            "entropy_coef": self.entropy_coef != 0.0,
            "use_adaptive_entropy": self.use_adaptive_entropy,
            "router_aux_loss_coef": self.aux_loss_enabled,
        }
        if asked := [name for name, is_set in by_micro_batch.items() if is_set]:
            raise ValueError(
                f"{', '.join(asked)} makes the loss depend on which rollouts share a micro-batch, and the balancer's "
                "are not TRL's. Leave it out"
            )
        if self.num_iterations != 1:
            raise ValueError(f"a rank batch is trained on once: num_iterations must be 1, not {self.num_iterations}")
        if self.args.steps_per_generation % self.args.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation ({self.args.steps_per_generation}) must be a multiple of "
                f"gradient_accumulation_steps ({self.args.gradient_accumulation_steps}): the balancer makes whole steps"
            )
        if not config.micro_batches.equal_number:
            raise ValueError(
                "TRL's metrics need as many micro-batches on every rank: leave micro_batches.equal_number at True"
            )
        if config.micro_batches.max_tokens is not None and not config.cost.padded:
            raise ValueError(
                f"cost={config.cost!r} does not count padding, so micro_batches.max_tokens would not bound a "
                "micro-batch. Leave cost at PaddedCost()"
            )

    def _connected(self, stack: ExitStack, config: sb.BalancerConfig) -> _Link:
        """Linked to the balancer until the stack unwinds."""
        # alone, nobody joins: no port, no store
        if config.dp_size == 1:
            alone = stack.enter_context(sb.blocking(config))
            batches = alone.batches()
            return _Link(alone.put, lambda: next(batches).ranks[0], alone.end)
        name = f"trl-{next(_blocks)}"  # the last block's balancer may still be leaving the store
        hosted = None
        if self.accelerator.is_main_process:
            hosted = stack.enter_context(sb.blocking(config))
            hosted.serve(sb.TorchTransport.in_world(name=name))
        producer = stack.enter_context(sb.connect(name=name))
        feed = sb.RankFeed(name=name)
        stack.callback(feed.close)

        def end() -> None:
            if hosted is not None:
                hosted.end()
            for _ in feed:  # acknowledges what was trained
                pass

        return _Link(producer.put, lambda: next(feed), end)

    def _rollouts(self, scored: dict[str, Any]) -> list[sb.Rollout]:
        """Rollouts that this rank generated and scored; prompts padded as the longest on any rank."""
        from accelerate.utils import send_to_device
        from trl.trainer.utils import split_pixel_values_by_grid

        # micro-batches mix rows of all ranks, and the cap must bound the widest
        longest = self.accelerator.gather(scored["prompt_mask"].sum(1).max()).max()
        here = send_to_device(split_pixel_values_by_grid(scored), "cpu")
        return rollouts_from(here, prompt_length=int(longest))

    def _weighted(self, share: Any, calls: int) -> list[dict[str, Any]]:
        """Inputs of each micro-batch, such that TRL makes a mean of it, and its weight among the step's.

        TRL divides that mean by the gradient accumulation, and DDP and FSDP the gradients by the ranks.
        """
        by_tokens = self.loss_type in _MEANS_OVER_TOKENS
        ranks, per_generation = self.accelerator.num_processes, self.args.steps_per_generation
        # a step of several that share a generation: TRL divides by the mean of their tokens, not by its own
        whole = self._generated_tokens * calls / per_generation if by_tokens else share.global_num_rollouts
        inputs = inputs_from(share, pad_token_id=self._tokenizer.pad_token_id)
        for one in inputs:
            tokens = (one["completion_mask"] * one.get("tool_mask", 1)).sum()
            part = int(tokens) if by_tokens else len(one["completion_mask"])
            one[_WEIGHT] = calls * ranks * part / max(whole, 1)
            one["num_items_in_batch"] = tokens * ranks * per_generation
        return inputs

    # --- TRL's own bookkeeping ----------------------------------------------------------------------------------------

    @contextmanager
    def _gradients_to_come(self, model: Any) -> Iterator[None]:
        """More micro-batches of the step follow: nothing is to be synchronised yet."""
        state = self.accelerator.gradient_state
        before = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with self.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(before)


@contextmanager
def _gathering_ragged(accelerator: Any) -> Iterator[None]:
    """``accelerator.gather`` of as many rows as each rank has: filled up with NaN, which TRL leaves out."""
    gather = accelerator.gather
    accelerator.gather = lambda tensor: gather(accelerator.pad_across_processes(tensor, pad_index=math.nan))
    try:
        yield
    finally:
        accelerator.gather = gather
