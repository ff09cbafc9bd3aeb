"""Wrong numbers are found, right ones pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncpar.train import Expectation, Summary, compare, compression_ratio, find_fault

SUMMARY = Summary(
    ranks=4,
    steps=2,
    first_loss=5.0,
    last_loss=2.0,
    bytes_sent_per_rank=100,
    compression_ratio=1.0,
    seconds=1.0,
    tokens_per_second=1.0,
)


def test_the_largest_relative_difference_counts() -> None:
    summary = compare(SUMMARY, [5.0, 2.0], [5.0, 2.5])
    assert summary.single_process_last_loss == 2.5
    assert summary.max_relative_loss_difference == pytest.approx(0.2)


EXACT = Expectation(every_loss=1e-5)
LOSSY = Expectation(last_loss=0.02, least_ratio=3.8)


def test_equal_losses_have_no_fault() -> None:
    assert find_fault(compare(SUMMARY, [5.0, 2.0], [5.0, 2.0]), EXACT) is None


@pytest.mark.parametrize("wrong", [2.0001, float("nan")])
def test_a_difference_at_any_step_is_a_fault_without_compression(wrong: float) -> None:
    fault = find_fault(compare(SUMMARY, [wrong, 2.0], [2.0, 2.0]), EXACT)
    assert fault is not None
    assert "more than 1e-05" in fault


def test_a_lossy_run_may_differ_by_two_percent_at_the_end() -> None:
    lossy = replace(SUMMARY, compression_ratio=3.9)
    assert find_fault(compare(lossy, [9.0, 2.0], [5.0, 2.03]), LOSSY) is None
    fault = find_fault(compare(lossy, [5.0, 2.0], [5.0, 2.1]), LOSSY)
    assert fault is not None
    assert "differs from that of one process by 4.8%, more than 2%" in fault


def test_a_lossy_run_that_is_not_a_number_is_a_fault() -> None:
    lossy = replace(SUMMARY, compression_ratio=3.9, last_loss=float("nan"))
    assert find_fault(compare(lossy, [5.0, float("nan")], [5.0, 2.0]), LOSSY) is not None


def test_a_lossy_run_must_shrink_the_traffic() -> None:
    summary = compare(replace(SUMMARY, compression_ratio=3.7), [5.0, 2.0], [5.0, 2.0])
    assert find_fault(summary, LOSSY) == "the bytes on the wire shrank 3.70 times, less than 3.8"


def test_the_ratio_is_against_an_all_reduce_of_least_traffic() -> None:
    assert compression_ratio(ranks=4, least_bytes=1500, steps=2, sent=750, is_exact=False) == pytest.approx(4.0)
    assert compression_ratio(ranks=4, least_bytes=1500, steps=2, sent=3100, is_exact=True) == 1.0
    assert compression_ratio(ranks=1, least_bytes=1500, steps=2, sent=0, is_exact=False) is None


def test_a_summary_is_one_sentence_for_a_person() -> None:
    exact = replace(SUMMARY, single_process_last_loss=2.0, max_relative_loss_difference=1.71e-7)
    assert exact.describe() == "four ranks and one process agree: losses differ by at most 1.7e-07"
    lossy = replace(exact, single_process_last_loss=1.96, max_relative_loss_difference=0.0204, ranks=12)
    assert lossy.describe() == (
        "12 ranks and one process: losses differ by at most 2.0%; the last ones are 2.0000 and 1.9600"
    )
    assert replace(SUMMARY, ranks=1).describe() == "one rank: the loss went from 5.00 to 2.00 in 2 steps"
