"""Every draw from every generator is seen, and nothing else is taken for one."""

# ruff: noqa: NPY002  The legacy generator is the one that models draw from unasked, and is what is watched.

import random

import numpy as np
import pytest
import torch

from tenterhook.call_trace.randomness import Randomness

DRAWS = {
    "torch": lambda: torch.rand(()),
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy, normal": np.random.randn,
    "numpy, seeded": lambda: np.random.seed(1),
    "numpy, other state": lambda: np.random.set_state(np.random.RandomState(3).get_state()),
}


@pytest.mark.parametrize("source", DRAWS)
def test_a_draw_is_seen_once(source):
    np.random.seed(0)
    watched = Randomness()
    assert not watched.drawn()
    for _ in range(4):  # Numbers from the normal distribution come in pairs, and the second moves nothing else.
        if source.startswith("numpy, s") or source == "numpy, other state":
            np.random.rand()
            assert watched.drawn()
        DRAWS[source]()
        assert watched.drawn()
        assert not watched.drawn()


def test_another_generator_in_numpys_place_is_seen():
    watched, before = Randomness(), np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        assert watched.drawn()
        assert not watched.drawn()
        np.random.rand()
        assert watched.drawn()
        assert not watched.drawn()
    finally:
        np.random.set_bit_generator(before)
    assert watched.drawn()


def test_a_whole_turn_of_the_generator_is_seen():
    np.random.seed(0)
    np.random.rand(7)
    watched = Randomness()
    np.random.bytes(624 * 4)  # It stands where it stood, in a new state.
    assert watched.drawn()
