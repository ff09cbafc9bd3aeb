"""scripts/bench/compare/device.py: its table and verdicts, and what it says where there is no GPU."""

from __future__ import annotations

import pytest

from asyncpar.device.fabric import FabricUnavailable
from scripts.bench.compare import device


def records(**seconds: float) -> list[dict[str, object]]:
    times = [{"what": "time", "size": 4, "side": side, "seconds": value} for side, value in seconds.items()]
    return [*times, {"what": "lateness", "p99": 0.0005}]


def test_medians_differences_and_lateness_are_shown() -> None:
    lines = device.show(records(asyncpar=30e-6, torch=28e-6, bare=20e-6), ranks=2, devices=1)
    assert lines[0] == "2 ranks on 1 GPUs, float32"
    assert [cell.strip() for cell in lines[4].strip("|").split("|")] == [
        "4", "30.0", "28.0", "20.0", "1.500x", "10.0", "short"
    ]  # fmt: skip
    assert lines[-1] == "A 1 ms timer of the loop was late by 0.50 ms (p99); at most 2 ms wanted: ok"


@pytest.mark.parametrize(
    ("ours", "bare", "size", "expected"),
    [
        (24e-6, 20e-6, 4, "ok"),
        (26e-6, 20e-6, 999_999, "short"),
        (102e-6, 100e-6, 1_000_000, "ok"),
        (104e-6, 100e-6, 1_000_000, "short"),
    ],
)
def test_what_is_wanted_depends_on_the_size(ours: float, bare: float, size: int, expected: str) -> None:
    assert device.verdict(ours, bare, size) == expected


def test_without_a_gpu_it_says_so_and_ends_with_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> int:
        raise FabricUnavailable("nccl: this host has no NVIDIA driver")

    monkeypatch.setattr(device, "count_devices", refuse)
    monkeypatch.setattr("sys.argv", ["device.py"])
    assert device.main() == device.NO_GPU
    assert capsys.readouterr().err == "not measured: nccl: this host has no NVIDIA driver\n"


@pytest.mark.parametrize("option", [["--sizes", "4,many"], ["--rounds", "0"], ["--ranks", "0"]])
def test_wrong_options_are_refused(option: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["device.py", *option])
    with pytest.raises(SystemExit, match="2"):
        device.main()
