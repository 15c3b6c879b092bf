"""Task to be learned: a conversation in which every answer can be checked.

The user reads out digits for as long as they like. To each, the policy answers with the larger of the last two; when
the user says ".", it hangs up:

    prompt 4 | user 7 policy 7 | user 2 policy 7 | user 3 policy 3 | user . policy STOP

The reward is the fraction of answers that were right; hanging up early forfeits the rest. As with agents, the user is
random: siblings of one prompt hear different digits, and lengths are heavy-tailed, within a group too. That is what
makes data-parallel ranks wait for each other.
"""

from __future__ import annotations

import random

__all__ = ["MAX_TOKENS", "STOP", "VOCAB_SIZE", "Conversation", "new_user"]

DOT, STOP = 10, 11
VOCAB_SIZE = 12
MIN_DIGITS, MAX_DIGITS = 2, 100
MAX_TOKENS = 1 + 2 * (MAX_DIGITS + 1)
"""Of a rollout: the prompt, then what the user and the policy say in turn."""


class Conversation:
    """The environment of one rollout: what the user will say, and how the policy is doing."""

    def __init__(self, prompt: int, digits: list[int]) -> None:
        self._heard, self._to_say = prompt, digits
        self._num_answers_due = len(digits) + 1
        self._num_right = 0
        self._expected = STOP

    def opening(self) -> list[int]:
        """The prompt, and what the user says first."""
        return [self._heard, self._say()]

    def reply(self, answer: int) -> list[int]:
        """The user's next line; nothing once the conversation is over."""
        self._num_right += answer == self._expected
        over = STOP in (answer, self._expected)
        return [] if over else [self._say()]

    @property
    def reward(self) -> float:
        """Share of the answers due that were right, 0 to 1."""
        return self._num_right / self._num_answers_due

    def _say(self) -> int:
        if not self._to_say:
            self._expected = STOP
            return DOT
        digit = self._to_say.pop()
        self._expected, self._heard = max(self._heard, digit), digit
        return digit


def new_user(prompt: int, rng: random.Random) -> Conversation:
    """A user who reads out seven digits or so at the median, a hundred now and then."""
    num_digits = min(max(round(rng.lognormvariate(1.9, 1.1)), MIN_DIGITS), MAX_DIGITS)
    return Conversation(prompt, [rng.randrange(10) for _ in range(num_digits)])
