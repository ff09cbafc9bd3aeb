"""Slurm's short forms of lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.core.config.hostlist import expand_hosts, expand_tasks
from asyncpar.errors import UsageError

LISTS = {
    "n1": ["n1"],
    "a,b": ["a", "b"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[001-003,7]": ["n001", "n002", "n003", "n7"],
    "n[8-11]": ["n8", "n9", "n10", "n11"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "gpu[1-2]x[5-6]": ["gpu1x5", "gpu1x6", "gpu2x5", "gpu2x6"],
    "n[001-002],gpu[1-2]x[5-6],login": ["n001", "n002", "gpu1x5", "gpu1x6", "gpu2x5", "gpu2x6", "login"],
    "rack[1,3]-node[01-02].site.org": [
        "rack1-node01.site.org",
        "rack1-node02.site.org",
        "rack3-node01.site.org",
        "rack3-node02.site.org",
    ],
}


@pytest.mark.parametrize("text", LISTS)
def test_a_list_of_hosts_is_expanded(text: str) -> None:
    assert expand_hosts(text) == LISTS[text]


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "n[1-3", "n1]", "n[]", "n[3-1]", "n[a-b]", "n[1,,2]", "n[[1]]", "n[1-99999999]", "n[²]"]
)
def test_a_wrong_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^hosts: expected"):
        expand_hosts(text)


def test_a_product_of_hosts_is_bounded() -> None:
    with pytest.raises(UsageError, match="at most 65536"):
        expand_hosts("a[1-9999]b[1-9999]c[1-9999]")


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2(x2),1", [2, 2, 1]), ("3,1(x2)", [3, 1, 1]), ("1,2,1", [1, 2, 1]), ("8(x3)", [8, 8, 8])],
)
def test_tasks_per_node_are_expanded(text: str, counts: list[int]) -> None:
    assert expand_tasks(text) == counts


@pytest.mark.parametrize("text", ["", "a", "2(x", "2(x2", "2(2)", "2,,1", "-1", "2(x99999999)"])
def test_wrong_tasks_per_node_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^tasks per node: expected"):
        expand_tasks(text)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=8))
def test_tasks_come_back_from_their_short_form(counts: list[int]) -> None:
    assert expand_tasks(",".join(f"{count}(x1)" for count in counts)) == counts
