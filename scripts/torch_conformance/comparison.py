"""Summary of a record: counts, and each test that the baseline passes and the other backend does not.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.torch_conformance.outcome import Outcome, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A test that the baseline passes and the other does not.  ``outcome`` is None where it was not played."""

    test: str
    outcome: Outcome | None
    reason: str

    @property
    def ending(self) -> str:
        return "not played" if self.outcome is None else str(self.outcome.status)

    @property
    def shown_reason(self) -> str:
        """The known reason, or else the last line of what the test said."""
        if self.reason or self.outcome is None:
            return self.reason or ""
        return f"unexplained: {self.outcome.last_line}"


def count(outcomes: Mapping[str, Outcome]) -> Counter[Status]:
    return Counter(outcome.status for outcome in outcomes.values())


def differences(
    baseline: Mapping[str, Outcome], other: Mapping[str, Outcome], reasons: Mapping[str, str]
) -> list[Difference]:
    """Return the tests that ``baseline`` passes and ``other`` does not, by name."""
    return [
        Difference(test=test, outcome=other.get(test), reason=reasons.get(test, ""))
        for test in sorted(baseline)
        if baseline[test].status is Status.PASSED and (test not in other or other[test].status is not Status.PASSED)
    ]


def stale_reasons(other: Mapping[str, Outcome], reasons: Mapping[str, str]) -> list[str]:
    """Return the tests that pass although a reason says why they do not."""
    return [test for test in sorted(reasons) if test in other and other[test].status is Status.PASSED]


def markdown(names: Sequence[str], outcomes: Mapping[str, Mapping[str, Outcome]], found: Sequence[Difference]) -> str:
    """Return the table for a README: a row per backend, then one per difference."""
    counts = {name: count(outcomes.get(name, {})) for name in names}
    lines = ["| backend | " + " | ".join(Status) + " |", "|---|" + "---:|" * len(Status)]
    lines += [f"| {name} | " + " | ".join(str(counts[name][status]) for status in Status) + " |" for name in names]
    if found:
        lines += ["", f"| passes with {names[0]} | {names[-1]} | why |", "|---|---|---|"]
        lines += [f"| `{one.test}` | {one.ending} | {one.shown_reason.replace('|', '/')} |" for one in found]
    return "\n".join(lines)
