"""TRL: ``GRPOTrainer`` and ``AsyncGRPOTrainer`` on a balancer, and GRPO's dict in and out of rollouts.

::

    class Trainer(BalancedGRPO, GRPOTrainer):                            # rows are dealt to the ranks anew
        pass

    trainer = Trainer(model, args=args, reward_funcs=reward, train_dataset=data)
    with trainer.balanced(micro_batches=sb.MicroBatches(max_tokens=32_768)):
        trainer.train()

    patch()                                                              # AsyncGRPOTrainer then takes our plan as it is
    trainer = AsyncGRPOTrainer(..., rollout_worker=RolloutSource(balancer, args))

``rows`` translates, ``synchronous`` and ``asynchronous`` are the two trainers.
"""

from stream_balancer.integrations.trl.asynchronous import RolloutSource, patch, rollouts_from_samples
from stream_balancer.integrations.trl.rows import inputs_from, rollouts_from
from stream_balancer.integrations.trl.synchronous import BalancedGRPO

__all__ = ["BalancedGRPO", "RolloutSource", "inputs_from", "patch", "rollouts_from", "rollouts_from_samples"]
