"""The time limit of steps: that of a configuration, or else the timeout of the communicator."""

from __future__ import annotations

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.agreement.exchanges import ALL, Comparison, digest_of
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.checks import is_default
from asyncpar.core.config.parallel import ThreeDParallelismConfig


class TimeLimit:
    """The limit of the synchronizer ``name``, and ``communicator``, a group of its ranks with that limit.

    If the limit is not that of ``over``, the group is a separate one, in which ranks with different limits would not
    meet; so they compare limits before the first step, in a group that exists for this alone.  There they also compare
    the layout of ranks, on which the form of all later comparisons depends.
    """

    def __init__(self, over: Communicator, config: ThreeDParallelismConfig, name: str) -> None:
        self._over = over
        self._name = name
        milliseconds = config.communication_timeout_ms
        self._layout = f"ranks laid out as {config.rank_order()}"
        self._milliseconds = None if is_default(milliseconds) else milliseconds
        is_own = self._milliseconds is not None and over.timeout != milliseconds / 1000
        self.communicator = self._limited("timed") if is_own else over
        self._is_own = is_own
        self._is_exempt = over.size == 1
        self._is_compared = self._is_exempt
        self._purpose = "limit"
        self._difference: str | None = None

    async def compare(self) -> None:
        """Raise ``SettingsDiffer``, on every rank and in every step, if ranks have different limits or layouts.

        They are exchanged once, by the first call, however it ends, and again after ``restart``.
        """
        if self._difference is not None:
            raise SettingsDiffer(self._difference)
        if self._is_compared:
            return
        self._is_compared = True
        group = self._limited(self._purpose)
        lines = {ALL: (self._layout, self._described())}
        digest = digest_of((self._layout, f"{self._milliseconds}" if self._is_own else ""))
        comparison = Comparison(group, lines, key="limit", rare="limit", digests={ALL: digest})
        try:
            await comparison.run()
        except SettingsDiffer as error:
            self._difference = str(error)
            raise
        finally:
            comparison.close()
            group.close()

    def skip_comparison(self) -> None:
        """Skip the comparison: no rank has a limit of its own."""
        self._is_exempt = self._is_compared = True

    def restart(self, number: int) -> None:
        """Compare again, since some ranks may have missed it, separately from remains of earlier comparisons."""
        self._is_compared = self._is_exempt
        self._purpose = f"limit/{number}"
        self._difference = None

    def _limited(self, purpose: str) -> Communicator:
        """Return the group for ``purpose`` of all ranks, with the limit of this one."""
        own = self._over.subgroup(range(self._over.size), name=self._name, key=f"{self._name}/{purpose}")
        assert own is not None, "this rank is one of its ranks"
        if self._milliseconds is not None:
            own.timeout = self._milliseconds / 1000
        return own

    def _described(self) -> str:
        if self._milliseconds is not None:
            return f"communication_timeout_ms {self._milliseconds}"
        seconds = self._over.timeout
        limit = "which has none" if seconds is None else f"{seconds:g} s"
        return f"no communication_timeout_ms but the timeout of its communicator, {limit}"
