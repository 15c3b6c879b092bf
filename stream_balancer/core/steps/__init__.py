"""Steps in flight: who has what of each, and what is to be done next."""

from stream_balancer.core.steps.ledger import (
    TRAIN,
    Ack,
    Behind,
    Drop,
    End,
    Go,
    HeldItem,
    HeldStep,
    Item,
    Ledger,
    Order,
    Piece,
    RankId,
    Recall,
    Refuse,
    Replan,
    Rewind,
    Seal,
    Send,
    SendSeal,
)

__all__ = [
    "TRAIN", "Ack", "Behind", "Drop", "End", "Go", "HeldItem", "HeldStep", "Item", "Ledger", "Order", "Piece", "RankId",
    "Recall", "Refuse", "Replan", "Rewind", "Seal", "Send", "SendSeal",
]  # fmt: skip
