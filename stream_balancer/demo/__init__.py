"""``stream-balancer demo``: the whole route with real processes, first round-robin, then balanced.

    options      which knobs
    rollouts     what is generated: lengths, and tokens that both sides can check
    model        what is trained
    rank         a trainer rank, a process of its own
    main         the controller (this process: workers and balancer), and the two runs, one after the other
    report       what was measured, and whether every rollout was trained on exactly once
    view         how that looks on a terminal

The library is used as anybody uses it: ``serve``, ``RankFeed``, ``sb.Observer``. What may not enter: a way around it.
"""
