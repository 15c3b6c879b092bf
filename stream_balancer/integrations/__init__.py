"""Adapters: what a trainer's own batch is as rollouts, and what a rank batch is as the trainer's own.

One file (or package) per trainer, named as the trainer's package is. An adapter translates and installs; it decides
nothing. What it needs decided (who goes now, on which rank, in which micro-batch) it asks of ``planning`` and
``StreamBalancer``, by public names (``import stream_balancer as sb``), like any other user. What several adapters do is
in ``_rows`` (rows of a batch to rollouts and back), ``_plans`` and ``partitions``.

What may not enter: an import of a trainer at the top of a file (import it inside the function that needs it, so that
``import stream_balancer.integrations.verl`` works where verl is not installed, and costs nothing; but a file that is a
subclass of a trainer's class imports it), a trainer's code,
and anything that another module would need: nothing else in the package imports this one, and no adapter imports
another. What a test of an adapter needs is in the environment of ``make test-integrations``.
"""
