"""The identity of a process, by which others of its host see it end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from asyncpar.core.addresses import resolve
from asyncpar.net.membership.host import ProcessMark, process_mark


class Child:
    """A process that waits to be killed."""

    def __init__(self) -> None:
        program = (
            "from asyncpar.net.membership.host import process_mark as p; m = p(); print(m.place, m.pid, m.started)"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{program}; print(flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Child:
        assert self._process.stdout is not None
        place, pid, started = self._process.stdout.readline().split()
        self.mark = ProcessMark(place=place, pid=int(pid), started=int(started))
        return self

    def kill(self, *, is_reaped: bool) -> None:
        """Return when the process has ended; unless it is reaped, a zombie is left."""
        os.kill(self.mark.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.mark.pid, os.WEXITED | os.WNOWAIT)
        if is_reaped:
            self._process.wait()

    def stop(self) -> None:
        """Return when the process is stopped."""
        os.kill(self.mark.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.mark.pid, os.WSTOPPED | os.WNOWAIT)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_process_is_seen_to_stop_and_to_end(*, is_reaped: bool) -> None:
    with Child() as child:
        own = process_mark()
        assert own is not None
        assert own.place == child.mark.place
        assert (child.mark.has_ended, child.mark.is_stopped) == (False, False)
        child.stop()
        assert (child.mark.has_ended, child.mark.is_stopped) == (False, True)
        child.kill(is_reaped=is_reaped)
        assert (child.mark.has_ended, child.mark.is_stopped) == (True, False)


def test_another_process_with_the_number_of_an_earlier_one_is_not_that_one() -> None:
    own = process_mark()
    assert own is not None
    assert not own.has_ended
    assert replace(own, started=own.started - 1).has_ended


def test_what_cannot_be_seen_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    own = process_mark()
    assert own is not None

    def kill(_pid: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    assert (own.has_ended, own.is_stopped) == (False, False)


def test_a_process_whose_proc_is_another_namespaces_has_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readlink", lambda _: "1")
    assert process_mark() is None


@pytest.mark.parametrize("name", ["a..b", "x" * 64, "."])
def test_what_cannot_be_a_name_is_one_that_is_not_known(name: str) -> None:
    with pytest.raises(OSError, match=r"."):
        resolve(name)
