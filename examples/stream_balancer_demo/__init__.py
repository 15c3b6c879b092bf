"""``stream-balancer demo``: the whole route with real processes, first round-robin, then balanced.

    options, rollouts    which knobs; what is generated: lengths, and tokens that both sides can check
    model, rank          what is trained; a trainer rank, a process of its own
    main, report         the controller and the two runs; the figures, and whether each rollout was trained on once

The library is used as anybody uses it: ``sb.serve``, ``sb.RankFeed``, ``sb.Observer``.
"""
