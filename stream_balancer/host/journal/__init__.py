"""The journal: what was accepted survives the controller. A put returns once its rollout is on the disk.

::

    put --write--> queue  --> writer thread: all that wait, one transaction, one fsync --> puts return, together
    batches() --flush-->  `   acknowledgements and evictions are in the same transaction

``journal`` (who waits for whom, and events as rows), ``writer`` (the thread), ``store`` (the database, its lock, the
disk), ``handed`` (what peers have said); the rows are ``host.records``. docs/restarting.md has the
promise, the protocol and the measurements.
"""

from stream_balancer.host.journal.journal import Journal, Recovered
from stream_balancer.host.journal.log import Change

__all__ = ["Change", "Journal", "Recovered"]
