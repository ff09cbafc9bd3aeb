"""The secret comes from a file or is made, and is removed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncpar.errors import UsageError
from asyncpar.launch.host_placement import HostPlacement
from asyncpar.launch.job import check_secret_options, obtain_secret
from asyncpar.launch.options import LaunchOptions
from asyncpar.launch.reaper_client import ReaperClient

pytestmark = pytest.mark.process


def placement(*, bind: str = "127.0.0.1") -> HostPlacement:
    return HostPlacement(
        host="h",
        host_id="h-1",
        nproc=1,
        serve_at=None,
        may_connect=False,
        coordinator="127.0.0.1:1",
        bind=bind,
        meets_at=bind,
        master_addr="127.0.0.1",
        job="j",
    )


@pytest.fixture
def reaper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReaperClient]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = ReaperClient()
    yield made
    made.close()


def test_agents_that_meet_over_a_network_need_a_secret_file() -> None:
    options = LaunchOptions(program="x", nnodes=2, endpoint="10.0.0.1:1")
    with pytest.raises(UsageError, match="--secret-file: needed when agents meet over a network"):
        check_secret_options(options, placement(bind="10.0.0.2"))
    check_secret_options(options, placement())


def test_a_job_on_one_host_gets_a_secret_of_its_own_for_as_long_as_it_runs(reaper: ReaperClient) -> None:
    options = LaunchOptions(program="x")
    with ExitStack() as stack:
        one, other = (obtain_secret(options, placement(), reaper, stack) for _ in range(2))
        assert one.secret != other.secret
        assert one.path.read_bytes() == one.secret
        assert stat.S_IMODE(one.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(one.path.parent.stat().st_mode) == 0o700
        assert repr(one.secret) not in repr(one)
    assert not one.path.parent.exists()


def test_agents_on_one_machine_share_a_secret_until_all_are_there(reaper: ReaperClient) -> None:
    options = LaunchOptions(program="x", nnodes=2, endpoint="127.0.0.1:1")
    with ExitStack() as stack:
        one, other = (obtain_secret(options, placement(), reaper, stack) for _ in range(2))
        assert one.secret == other.secret
        assert one.path != other.path
        one.clear_rendezvous_path()
        other.clear_rendezvous_path()
        assert one.path.read_bytes() == one.secret
        assert obtain_secret(options, placement(), reaper, stack).secret != one.secret


def test_a_rendezvous_path_that_others_can_enter_is_refused(reaper: ReaperClient, tmp_path: Path) -> None:
    options = LaunchOptions(program="x", nnodes=2, endpoint="127.0.0.1:1")
    with ExitStack() as stack:
        obtain_secret(options, placement(), reaper, stack)
        shared = tmp_path / f"asyncpar-{os.geteuid()}"
        shared.chmod(0o755)
        with pytest.raises(UsageError, match="not a private directory"):
            obtain_secret(options, placement(), reaper, stack)
        shared.chmod(0o700)


def test_the_reaper_removes_what_the_agent_could_not(reaper: ReaperClient, tmp_path: Path) -> None:
    secret = obtain_secret(LaunchOptions(program="x"), placement(), reaper, ExitStack())
    assert secret.path.exists()
    reaper.close()
    assert not secret.path.parent.exists()
