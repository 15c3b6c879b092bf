"""Every knob of the demo that makes no sense is refused, saying which."""

import pytest

from stream_balancer.demo.options import DemoOptions


def test_defaults_are_accepted_and_the_balanced_window_is_twice_the_batch():
    assert DemoOptions().balanced_window == 2 * DemoOptions().batch_size
    assert DemoOptions(window=100).balanced_window == 100


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"ranks": 0}, "ranks must be an int >= 1"),
        ({"rollouts": 1.5}, "rollouts must be an int >= 1"),
        ({"workers": 0}, "workers must be an int >= 1"),
        ({"max_length": 1}, "max_length must be an int >= 2"),
        ({"deadline_s": 0.0}, "deadline_s must be a finite number > 0"),
        ({"scale": float("nan")}, "scale must be a finite number > 0"),
        ({"tokens_per_second": -1.0}, "tokens_per_second must be a finite number > 0"),
        ({"batch_size": 2}, r"batch_size \(2\) must be >= ranks \(4\)"),
        ({"window": 19}, r"window \(19\) must be >= batch_size \(20\)"),
        ({"hidden_size": 60}, r"hidden_size \(60\) must be a multiple of"),
        ({"backend": "curio"}, "backend must be 'asyncio' or 'trio'"),
    ],
)
def test_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        DemoOptions(**knobs)
