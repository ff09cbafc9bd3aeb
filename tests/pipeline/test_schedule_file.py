from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.core.config.parallel import PipelineScheduleType as Type
from asyncpar.errors import UsageError
from asyncpar.pipeline import (
    CustomSchedule,
    InvalidSchedule,
    PipelineSchedule,
    format_schedule,
    load_schedule,
    parse_schedule,
    simulate,
    write_schedule,
)
from tests.pipeline.schedules import built_in_schedules, cells_of
from tests.soak import chosen


@settings(max_examples=chosen(20, soak=40), deadline=None)
@given(built_in_schedules())
def test_every_schedule_survives_the_way_through_a_file(schedule: PipelineSchedule) -> None:
    read = parse_schedule(format_schedule(schedule))
    assert cells_of(read) == cells_of(schedule)
    assert read.digest() == schedule.digest()
    for rank in range(schedule.num_stages):
        assert read.get_stage_schedule(rank) == schedule.get_stage_schedule(rank)
        assert read.virtual_stages_of(rank) == schedule.virtual_stages_of(rank)


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    schedule = PipelineSchedule(num_stages=2, num_microbatches=2, schedule_type=Type.GPIPE)
    write_schedule(schedule, path)
    assert path.read_text() == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    read = load_schedule(path)
    assert (read.name, read.num_stages, read.num_microbatches, read.num_model_chunks) == ("mine.csv", 2, 2, 1)
    assert simulate(read).makespan == simulate(schedule).makespan
    assert repr(read) == "<CustomSchedule 'mine.csv': 2 ranks, 2 micro-batches>"


def test_blanks_small_letters_and_what_spreadsheets_add_do_not_matter() -> None:
    plain = parse_schedule("0F0,0B0\n1F0,1B0\n")
    assert parse_schedule(' 0f0 ,"0b0"\r\n,1F0, ,1B0,,\r\n\r\n').digest() == plain.digest()


def test_a_byte_order_mark_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\n")
    assert load_schedule(path).num_stages == 1


def test_ranks_may_hold_any_stages_if_they_hold_equally_many() -> None:
    schedule = CustomSchedule([["1F0", "2F0", "2B0", "1B0"], ["0F0", "3F0", "3B0", "0B0"]])
    assert [schedule.virtual_stages_of(rank) for rank in (0, 1)] == [(1, 2), (0, 3)]
    assert simulate(schedule, latency=1).makespan == 12 + 4


ZB1P = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0I0", "0X0", "row 1 (rank 0), column 3, cell '0X0': expected stage, F, B, I or W, and micro-batch"),
        ("1W1", "W1", "row 2 (rank 1), column 6, cell 'W1': expected stage, F, B, I or W, and micro-batch"),
        ("1W1", "1W1;1W0", "row 2 (rank 1), column 6, cell '1W1;1W0': expected stage"),
        ("1W1", "1W-1", "row 2 (rank 1), column 6, cell '1W-1': expected stage"),
        ("1W1", "1W٣", "row 2 (rank 1), column 6, cell '1W٣': expected stage"),
        ("1W1", "1W12345678901234567890", "cell '1W12345678901234567890': expected stage"),
        ("1W1", "1SEND_F1", "cell '1SEND_F1': expected stage, F, B, I or W, and micro-batch, such as '0F1'; sends and"),
        ("0W1", "1W1", "row 1 (rank 0), column 6, cell '1W1': wrong rank: stage 1 belongs to rank 1, not to rank 0"),
        ("1I1,", "", "row 2 (rank 1): missing action: 1I1 is never done"),
        ("0W0,", ",", "row 1 (rank 0): missing action: 0W0 is never done"),
        ("1I1", "1I0", "row 2 (rank 1), column 4, cell '1I0': the same action is there before: x.csv: row 2 (rank 1)"),
        ("0W1", "0W1,0B1", "column 5, cell '0I1': the whole backward pass is there as well: x.csv: row 1"),
        (
            "1F0,1I0",
            "1I0,,1F0",
            "deadlock: x.csv: row 2 (rank 1), column 1, cell '1I0' waits for x.csv: row 2 (rank 1), "
            "column 3, cell '1F0', which stands behind it",
        ),
        ("0F0,0F1,0I0", "0F0,0I0,0F1", None),
        ("0F0", "0F000", None),
    ],
)
def test_faults_are_named_by_row_column_and_cell(old: str, new: str, message: str | None) -> None:
    text = ZB1P.replace(old, new, 1)
    assert text != ZB1P
    if message is None:
        parse_schedule(text, name="x.csv")
        return
    with pytest.raises(UsageError) as caught:
        parse_schedule(text, name="x.csv")
    assert "x.csv: " in str(caught.value)
    assert message in str(caught.value)


def test_ranks_that_wait_for_each_other_are_named_by_their_cells() -> None:
    with pytest.raises(InvalidSchedule) as caught:
        parse_schedule("0F0,0B0,0F1,0B1\n1F0,,1F1,1B0,1B1\n", name="x.csv")
    assert str(caught.value) == (
        "deadlock: x.csv: row 1 (rank 0), column 2, cell '0B0' waits for x.csv: row 2 (rank 1), column 4, cell '1B0'; "
        "x.csv: row 2 (rank 1), column 3, cell '1F1' waits for x.csv: row 1 (rank 0), column 3, cell '0F1'"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "schedule: expected one row per rank, got none"),
        (" \n\n", "schedule: expected one row per rank, got none"),
        ("0F0,0B0\n\n1F0,1B0\n", "row 2 (rank 1): expected at least one cell such as '0F0', got none"),
        (
            "0F0,0B0,1F0,1B0\n2F0,2B0\n",
            "row 2 (rank 1): expected as many stages on each row, got 1 here and 2 on row 1",
        ),
        ("0F0,0B0\n2F0,2B0\n", "expected every stage from 0 to 2, got no cell of stage 1"),
        ("0F999999,0B999999\n", "row 1 (rank 0): missing action: 0F0 is never done"),
        ('0F0,"0B0\n', "schedule: expected comma-separated values, got something else"),
    ],
)
def test_texts_that_are_no_schedule_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_schedule(text)
    assert message in str(caught.value)


def test_a_row_that_is_one_text_is_refused() -> None:
    with pytest.raises(UsageError, match="custom schedule: row 1: expected a sequence of cells, got one text '0F0'"):
        CustomSchedule(["0F0", "0B0"])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"path: expected a file that can be read, got '.*none.csv': No such file"):
        load_schedule(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"path: expected a text file \(UTF-8\), got '.*binary.csv'"):
        load_schedule(tmp_path / "binary.csv")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    schedule = PipelineSchedule(num_stages=1, num_microbatches=1, schedule_type=Type.GPIPE)
    with pytest.raises(UsageError, match=r"path: expected a place for a file, got '.*none.mine.csv': No such file"):
        write_schedule(schedule, tmp_path / "none" / "mine.csv")


CELLS = st.from_regex(r"[0-2][FBIW][0-2]", fullmatch=True) | st.text(max_size=4)


@settings(max_examples=chosen(40, soak=100), deadline=None)
@given(st.text() | st.lists(st.lists(CELLS, max_size=6).map(",".join), max_size=3).map("\n".join))
def test_any_text_is_a_schedule_that_can_run_or_a_usage_error_that_names_it(text: str) -> None:
    assert outcome(text) == "runs" or "schedule: " in outcome(text)


def outcome(text: str) -> str:
    try:
        simulate(parse_schedule(text))
    except UsageError as error:
        return str(error)
    return "runs"
