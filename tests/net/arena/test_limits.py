"""Limits of a process on its host, from the files of the kernel."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from asyncpar.net.arena.limits import (
    available_memory,
    core_quota,
    count_memory_kills,
    may_spin,
    read_memory_use,
    usable_cores,
)

MEMINFO = "MemTotal: 4000 kB\nMemAvailable:    1000 kB\nHugePages_Total:       0\n"


def make_host(root: Path, groups: str, files: dict[str, str]) -> None:
    """Make the files of a kernel: ``groups`` are those of this process, ``files`` lie among the control groups."""
    contents = {"proc/self/cgroup": groups, "proc/meminfo": MEMINFO}
    contents |= {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def test_without_control_groups_the_host_is_the_limit(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    assert core_quota(tmp_path) == math.inf
    assert available_memory(tmp_path) == 1000 << 10


def test_where_nothing_is_known_nothing_is_limited(tmp_path: Path) -> None:
    assert core_quota(tmp_path) == math.inf
    assert available_memory(tmp_path) >= 1 << 59


def test_the_tightest_group_on_the_way_to_the_top_counts(tmp_path: Path) -> None:
    make_host(
        tmp_path,
        "0::/job/rank\n",
        {
            "job/cpu.max": "150000 100000",
            "job/rank/cpu.max": "max 100000",
            "job/memory.max": "500000\n",
            "job/memory.current": "200000\n",
            "job/memory.stat": "anon 7\ninactive_file 50000\n",
            "job/rank/memory.max": "max",
            "job/rank/memory.current": "1000",
        },
    )
    assert core_quota(tmp_path) == 1.5
    assert available_memory(tmp_path) == 350_000


def test_the_nearest_limit_of_memory_is_that_of_the_host_or_of_a_group(tmp_path: Path) -> None:
    assert read_memory_use(tmp_path) is None
    files = {"job/memory.max": "2000000", "job/memory.current": "300000", "job/memory.stat": "inactive_file 100000\n"}
    make_host(tmp_path, "0::/job/rank\n", files)
    assert read_memory_use(tmp_path) == (3000 << 10, 4000 << 10, False)
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("500000")
    assert read_memory_use(tmp_path) == (200_000, 500_000, True)
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max")
    assert read_memory_use(tmp_path) == (3000 << 10, 4000 << 10, False)


@pytest.mark.parametrize(
    ("groups", "files", "kills"),
    [
        (
            "0::/job/rank\n",
            {"job/rank/memory.events": "low 0\noom 9\noom_kill 2\n", "job/memory.events": "oom_kill 5"},
            2,
        ),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.oom_control": "under_oom 0\noom_kill 3\n"}, 3),
        ("4:memory:/host/only\n", {"memory/memory.oom_control": "oom_kill 1\n"}, 1),
        ("0::/\n", {}, 7),
    ],
)
def test_kills_for_want_of_memory_are_counted_by_both_versions_or_the_host(
    tmp_path: Path, groups: str, files: dict[str, str], kills: int
) -> None:
    assert count_memory_kills(tmp_path) is None
    make_host(tmp_path, groups, files)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    assert count_memory_kills(tmp_path) == kills


def test_inside_a_container_whose_path_is_the_hosts_the_top_counts(tmp_path: Path) -> None:
    files = {"cpu.max": "50000 100000", "memory.max": "4096", "memory.current": "8192"}
    make_host(tmp_path, "0::/../../docker/abc\n", files)
    assert core_quota(tmp_path) == 0.5
    assert available_memory(tmp_path) == 0


def test_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    make_host(
        tmp_path,
        "5:memory:/a\n4:cpu,cpuacct:/b\n1:name=systemd:/\n0::/\n",
        {
            "cpu,cpuacct/b/cpu.cfs_quota_us": "400000\n",
            "cpu,cpuacct/b/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "memory/a/memory.limit_in_bytes": "700000",
            "memory/a/memory.usage_in_bytes": "100000",
            "memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 5\n",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "5",
        },
    )
    assert core_quota(tmp_path) == 4.0
    assert available_memory(tmp_path) == 600_005


def test_this_host_has_processors_and_memory() -> None:
    assert usable_cores()
    assert core_quota() > 0
    assert 1 << 20 < available_memory() < 1 << 59


ONE, TWO = frozenset({0}), frozenset({0, 1})


@pytest.mark.parametrize(
    ("cores", "answer"),
    [
        ([TWO, TWO], True),
        ([TWO, TWO, TWO], False),
        ([ONE, frozenset({1})], True),
        ([ONE, ONE], False),
        ([ONE, TWO], False),
        ([TWO, TWO, frozenset({2, 3}), frozenset({2, 3})], True),
        ([frozenset(range(3))] * 3, True),
        ([TWO, frozenset()], False),
    ],
)
def test_ranks_spin_only_on_a_processor_of_their_own(cores: list[frozenset[int]], answer: bool) -> None:
    ranks = range(len(cores))
    quotas = dict.fromkeys(ranks, math.inf)
    assert may_spin(dict(enumerate(cores)), quotas, {rank: str(rank) for rank in ranks}) is answer


def test_ranks_that_share_a_process_do_not_spin() -> None:
    assert not may_spin({0: TWO, 1: TWO}, {0: math.inf, 1: math.inf}, {0: "a", 1: "a"})


@pytest.mark.parametrize(("quota", "answer"), [(1.9, False), (2.0, True)])
def test_ranks_spin_only_within_their_quota(quota: float, answer: bool) -> None:
    assert may_spin({0: TWO, 1: TWO}, {0: math.inf, 1: quota}, {0: "a", 1: "b"}) is answer
