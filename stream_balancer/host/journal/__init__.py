"""The journal: accepted rollouts survive the controller. A put returns once its rollout is on the disk.

::

    put --write--> queue  --> thread: one transaction and one fsync for the whole queue --> the puts return
    batches() --flush-->  `   the same transaction has acknowledgements and evictions

``journal`` turns events into rows. ``log`` has the thread, the database and its lock. ``handed`` has the facts of
peers. ``host.records`` has the format of a row. docs/restarting.md has the promise.
"""

from stream_balancer.host.journal.journal import Journal, Recovered
from stream_balancer.host.journal.log import Change

__all__ = ["Change", "Journal", "Recovered"]
