"""Numbers that all machines draw alike."""

from __future__ import annotations

import numpy as np

from asyncpar.codecs.draw import draw_positions, draw_uniform, draw_words, make_key


def test_words_are_those_of_splitmix64() -> None:
    """The first outputs for seed 1234567, as published with the generator."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert draw_words(4, 1234567).tolist() == expected


def test_keys_differ_with_numbers_their_order_and_their_count() -> None:
    keys = [make_key(), make_key(0), make_key(0, 0), make_key(1, 2), make_key(2, 1), make_key(12), make_key(-1)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 1 << 64 for key in keys)


def test_one_position_is_drawn_from_each_stratum() -> None:
    for count, size in ((0, 0), (0, 5), (1, 1), (7, 7), (7, 10), (1000, 1_000_000), (999, 65_537)):
        drawn = draw_positions(count, size, key=5)
        edges = np.arange(count + 1) * size // max(count, 1)
        assert ((drawn >= edges[:-1]) & (drawn < edges[1:])).all()


def test_uniform_draws_lie_within_one_of_zero_and_average_to_it() -> None:
    drawn = draw_uniform(100_000, key=1)
    assert drawn.dtype == np.float32
    assert -1.0 <= drawn.min() < -0.999
    assert 0.999 < drawn.max() <= 1.0
    assert abs(float(drawn.mean())) < 0.01
