"""The rest of a round is given up at the right moment."""

from __future__ import annotations

import asyncio

import pytest

from asyncpar.actors.meshes.calls import INTERVAL, Notices
from asyncpar.errors import PeerLost
from asyncpar.testing import run_virtual


class Ended:
    """Remembers when what was given up, and why."""

    def __init__(self) -> None:
        self.all: list[tuple[float, int, str]] = []
        self._start = asyncio.get_running_loop().time()

    def give_up(self, failed: int, text: str) -> None:
        self.all.append((asyncio.get_running_loop().time() - self._start, failed, text))

    @property
    def times(self) -> list[float]:
        return [time for time, *_ in self.all]


def test_the_rest_is_given_up_again_and_again_until_all_have_answered_and_once_in_the_end() -> None:
    async def main() -> None:
        ended = Ended()
        with Notices(9, range(3), ended.give_up) as notices:
            notices.answered(0)
            notices.answered(2, PeerLost("it is gone\nfor good", rank=2))
            await asyncio.sleep(2.5 * INTERVAL)
            notices.answered(1, PeerLost("this, too", rank=1))
            await asyncio.sleep(10.0)
        await asyncio.sleep(10.0)
        assert ended.times == pytest.approx([INTERVAL, 2 * INTERVAL, 2.5 * INTERVAL + 10.0])
        assert {entry[1:] for entry in ended.all} == {(2, "rank 2 failed: it is gone")}

    run_virtual(main())


def test_nothing_is_given_up_while_nobody_fails() -> None:
    async def main() -> None:
        ended = Ended()
        with Notices(9, range(2), ended.give_up) as notices:
            notices.answered(0)
            await asyncio.sleep(10.0)
            notices.answered(1)
        assert ended.all == []

    run_virtual(main())


def test_who_leaves_when_all_have_answered_gives_nothing_up() -> None:
    async def main() -> None:
        ended = Ended()

        def leave() -> None:
            with Notices(9, range(1), ended.give_up) as notices:
                notices.answered(0)
                raise ValueError("enough")

        with pytest.raises(ValueError, match="enough"):
            leave()
        assert ended.all == []

    run_virtual(main())


def test_a_round_that_is_cancelled_is_given_up_once() -> None:
    async def main() -> None:
        ended = Ended()

        async def run() -> None:
            with Notices(9, range(2), ended.give_up):
                await asyncio.sleep(10.0)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run(), 3.0)
        assert ended.all == [(3.0, 9, "rank 9 cancelled the call")]

    run_virtual(main())
