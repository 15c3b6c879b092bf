"""Steps in flight: who has what of each, and what is to be done next."""

from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.orders import (
    Ack,
    Behind,
    Drop,
    End,
    Go,
    Mask,
    Order,
    RankAck,
    Recall,
    Refuse,
    Replan,
    Rewind,
    Send,
    SendSeal,
)
from stream_balancer.core.steps.state import TRAIN, HeldItem, HeldStep, Item, Piece, RankId, Seal, Share

__all__ = [
    "TRAIN", "Ack", "Behind", "Drop", "End", "Go", "HeldItem", "HeldStep", "Item", "Ledger", "Mask", "Order", "Piece",
    "RankAck", "RankId", "Recall", "Refuse", "Replan", "Rewind", "Seal", "Send", "SendSeal", "Share",
]  # fmt: skip
