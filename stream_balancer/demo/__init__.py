"""``stream-balancer demo``: the whole route with real processes, first round-robin, then balanced.

One file per question: ``options`` (which knobs), ``lengths`` (which rollouts), ``model`` (what is trained), ``worker``
(the controller process: rollout workers and the balancer), ``rank`` (one trainer rank), ``processes`` (children that
never outlive their parent), ``report`` (what was measured), ``main`` (the two runs, one after the other).
"""
