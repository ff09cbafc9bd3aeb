"""The bench of codecs: what it makes of its figures, and a tiny run of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncpar.codecs import Int8, parse_codec
from scripts.bench.figures.codecs import CODECS, WANTED, Figures, is_fast_enough, main, measure, parse_codecs, show


def figures(codec: str = "int8", speed: float = 3.0) -> Figures:
    return Figures(
        codec=codec,
        encode=2 * speed,
        encode_with_feedback=speed,
        decode=2 * speed,
        decode_add=2 * speed,
        times_smaller=3.98,
        relative_error=0.008,
    )


def test_the_table_says_which_speeds_were_reached() -> None:
    lines = show([figures(), figures(speed=2.9), figures("sign")], 1000)
    assert lines[2].endswith("3.98x    0.00800  encode 3: ok, decode_add 5: ok")
    assert lines[3].endswith("encode 3: short, decode_add 5: ok")
    assert lines[4].endswith("0.00800")
    assert is_fast_enough([figures(), figures("sign", 0.1)])
    assert not is_fast_enough([figures(), figures(speed=2.9)])


def test_bf16_is_judged_without_feedback() -> None:
    assert is_fast_enough([figures("bf16", 2.0)])
    assert not is_fast_enough([figures("bf16", 1.9)])


def test_all_codecs_of_which_a_speed_is_wanted_are_measured() -> None:
    assert set(WANTED) <= {codec.name for codec in parse_codecs(CODECS)}


def test_figures_are_those_of_the_codec() -> None:
    values = np.random.default_rng(0).standard_normal(5000, np.float32)
    row = measure(Int8(), values, 1)
    assert row.codec == "int8"
    assert row.times_smaller == pytest.approx(20_000 / 5020)
    assert 0.005 < row.relative_error < 0.01
    assert min(row.encode, row.encode_with_feedback, row.decode, row.decode_add) > 0


def test_a_tiny_run_prints_and_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "codecs.json"
    options = ["--size", "4K", "--rounds", "1", "--codecs", "sign,topk:0.1+int8", "--json", str(written)]
    monkeypatch.setattr(sys, "argv", ["codecs.py", *options])
    assert main() == 0
    assert "sign " in capsys.readouterr().out
    rows = json.loads(written.read_text())["codecs"]
    assert [parse_codec(row["codec"]).name for row in rows] == ["sign", "topk:0.1+int8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--codecs", "int7"], "codec: expected one of none"),
        (["--codecs", "powersgd:4"], "--codecs: expected codecs of single vectors, got powersgd:4"),
        (["--size", "big"], "--size: expected a size"),
        (["--rounds", "0"], "--rounds: expected 1 or more, got 0"),
    ],
)
def test_wrong_options_are_named(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["codecs.py", *options])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err
