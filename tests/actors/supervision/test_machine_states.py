"""The supervisor's machine against every kind of trouble: what must always hold."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncpar.actors.supervision.events import (
    BackoffElapsed,
    ChildEnded,
    ChildStarted,
    ChildStartFailed,
    ChildStopped,
    Command,
    Event,
    FailStart,
    FinishCommand,
    GiveUp,
    RestartRequest,
    StartAll,
    StartCommand,
    StopAll,
    StopCommand,
    StopRequest,
    WaitCommand,
)
from asyncpar.actors.supervision.machine import SupervisorMachine
from asyncpar.actors.supervision.policy import Backoff, Intensity, Restart, Strategy
from asyncpar.errors import AsyncparError
from tests.soak import chosen

OOPS = AsyncparError("oops")
NAMES = "abcde"
KINDS = [Restart.PERMANENT, Restart.PERMANENT, Restart.TRANSIENT, Restart.TEMPORARY]


class Supervision(RuleBasedStateMachine):
    """Children that start, fail and stop as chance has it, and a supervisor that is obeyed to the letter."""

    @initialize(
        kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=5),
        strategy=st.sampled_from(Strategy),
        restarts=st.integers(0, 9),
        period=st.floats(0.5, 10.0),
        backoff=st.sampled_from(
            [Backoff(), Backoff(initial=0.5, factor=2.0, maximum=4.0, jitter=0.5, reset_after=3.0)]
        ),
        is_manual=st.sampled_from([False, False, True]),
        is_up=st.sampled_from([True, True, True, False]),
        draw=st.floats(0.0, 1.0),
    )
    def begin(
        self,
        kinds: list[Restart],
        strategy: Strategy,
        restarts: int,
        period: float,
        backoff: Backoff,
        is_manual: bool,
        is_up: bool,
        draw: float,
    ) -> None:
        self.kinds = dict(zip(NAMES, kinds, strict=False))
        self.strategy, self.intensity = strategy, Intensity(restarts=restarts, period=period)
        self.is_manual = is_manual
        self.supervisor = SupervisorMachine(
            self.kinds, strategy=strategy, intensity=self.intensity, backoff=backoff, draw=lambda: draw
        )
        self.now = 0.0
        self.up: set[str] = set()
        self.asked: StartCommand | StopCommand | None = None
        self.wait: float | None = None
        self.last: list[Command] = []
        self.starts: dict[str, list[float]] = {name: [] for name in self.kinds}
        self.by_hand: set[str] = set()
        self.tell(StartAll())
        for _ in self.kinds if is_up else ():
            self.answer(True)

    # -- obeying ---------------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        for command in self.supervisor.handle(event, now=self.now):
            assert not self.last, f"{command} after {self.last}"
            match command:
                case StartCommand(child):
                    self.check_start(child)
                    self.asked = command
                case StopCommand(child):
                    self.check_stop(child)
                    self.asked = command
                case WaitCommand(until):
                    assert self.asked is None
                    assert until > self.now
                    self.wait = until
                case GiveUp() | FailStart() | FinishCommand():
                    assert self.asked is None
                    assert not self.up, f"{command} while {self.up} run"
                    self.last.append(command)

    def later(self, child: str) -> set[str]:
        return {name for name in self.up if name > child}

    def check_start(self, child: str) -> None:
        assert self.asked is None, "one at a time"
        assert child not in self.up, "two starts of one child"
        if not self.is_manual and self.strategy != Strategy.ONE_FOR_ONE:
            assert not self.later(child), "started out of order"
        starts = self.starts[child]
        assert not starts or self.kinds[child] != Restart.TEMPORARY, "temporary children are never restarted"
        starts.append(self.now)
        if not self.is_manual:
            recent = [at for at in starts[1:] if at >= self.now - self.intensity.period]
            assert len(recent) <= self.intensity.restarts + 1, "intensity exceeded"

    def check_stop(self, child: str) -> None:
        assert self.asked is None, "one at a time"
        assert child in self.up, "nothing to stop"
        if not self.is_manual:
            assert not self.later(child), "stopped out of order"

    def obeys(self) -> bool:
        return self.asked is not None

    def runs(self) -> bool:
        return bool(self.up)

    def waits(self) -> bool:
        return self.wait is not None

    def is_manual_now(self) -> bool:
        return self.is_manual and not self.last

    # -- what may happen -------------------------------------------------------------------------------------------

    @precondition(obeys)
    @rule(is_good=st.sampled_from([True, True, True, False]))
    def answer(self, is_good: bool) -> None:
        asked, self.asked = self.asked, None
        assert asked is not None
        if isinstance(asked, StopCommand):
            self.up.discard(asked.child)
            self.tell(ChildStopped(asked.child))
        elif is_good:
            self.up.add(asked.child)
            self.tell(ChildStarted(asked.child))
        else:
            self.tell(ChildStartFailed(asked.child, OOPS))

    @precondition(runs)
    @rule(choice=st.data(), is_failure=st.booleans())
    def end(self, choice: st.DataObject, is_failure: bool) -> None:
        child = choice.draw(st.sampled_from(sorted(self.up)))
        self.up.discard(child)
        self.tell(ChildEnded(child, OOPS if is_failure else None))

    @precondition(waits)
    @rule(part=st.sampled_from([0.5, 1.0, 1.0, 1.0, 3.0]))
    def wait_for_it(self, part: float) -> None:
        assert self.wait is not None
        self.now += part * (self.wait - self.now)
        self.wait = None
        self.tell(BackoffElapsed())

    @rule(seconds=st.floats(0.01, 8.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.wait is not None and self.now >= self.wait:
            self.wait = None
            self.tell(BackoffElapsed())

    @precondition(is_manual_now)
    @rule(choice=st.data())
    def stop_one(self, choice: st.DataObject) -> None:
        if self.supervisor.children:
            child = choice.draw(st.sampled_from(self.supervisor.children))
            self.by_hand.add(child)
            self.tell(StopRequest(child))

    @precondition(is_manual_now)
    @rule(choice=st.data())
    def restart_one(self, choice: st.DataObject) -> None:
        restartable = [name for name in self.supervisor.children if self.kinds[name] != Restart.TEMPORARY]
        if restartable and not self.supervisor.is_ending:
            child = choice.draw(st.sampled_from(restartable))
            self.by_hand.add(child)
            self.tell(RestartRequest(child))

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def permanent_children_run_or_are_about_to(self) -> None:
        if self.asked is None and self.wait is None and not self.last:
            down = {name for name, kind in self.kinds.items() if kind == Restart.PERMANENT} - self.up - self.by_hand
            assert not down, f"nobody cares about {down}"

    def teardown(self) -> None:
        if not hasattr(self, "supervisor"):
            return
        self.tell(StopAll())
        for _ in range(2 * len(self.kinds) + 2):
            if self.asked is not None:
                self.answer(True)
        assert len(self.last) == 1, "it ends exactly once"
        assert not self.up, "everything is stopped at the end"


TestSupervision = Supervision.TestCase
TestSupervision.settings = settings(max_examples=chosen(60, soak=300), stateful_step_count=30, deadline=None)
