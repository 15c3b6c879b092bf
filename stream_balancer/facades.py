"""Our async classes with blocking methods. What type checkers see of them is in ``facades.pyi``, which
``python tests/facade_stubs.py`` writes."""

from stream_balancer.client.producer import Producer
from stream_balancer.facade import facade
from stream_balancer.host.balancer import StreamBalancer
from stream_balancer.host.batches import Batches
from stream_balancer.host.blocking import OwnLoop
from stream_balancer.slots import Reservation, Slot

BlockingSlot = facade("BlockingSlot", Slot, without=("take", "done", "missing", "is_over", "number"))
BlockingReservation = facade("BlockingReservation", Reservation, undo={"__aenter__": lambda _, slot: slot.release()})
BlockingBatches = facade("BlockingBatches", Batches, undo={"__anext__": Batches.give_back})
BlockingProducer = facade("BlockingProducer", Producer, without=("aclose", "blocking"), timed=("reserve",))
BlockingBalancer = facade(
    "BlockingBalancer", StreamBalancer, base=OwnLoop, timed=("reserve",),
    without=("aclose", "async_state_dict", "parts", "record_step"),
)  # fmt: skip
blocking = BlockingBalancer
