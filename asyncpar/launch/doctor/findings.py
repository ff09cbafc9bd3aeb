"""Findings of the doctor: values, and their text.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    """The severity of a finding: ``warn`` may slow a job down, ``fail`` keeps it from running."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one check; ``advice`` says what to do, "" if nothing."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""
    host: str = ""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one host about itself and others."""

    host: str
    version: str
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1 if something is wrong, else 0."""
        return int(any(finding.verdict is Verdict.FAIL for finding in self.findings))


def well(check: str, found: str, *, host: str = "") -> Finding:
    """Return the finding that all is well."""
    return Finding(check=check, verdict=Verdict.OK, found=found, host=host)


def warn(check: str, found: str, advice: str, *, host: str = "") -> Finding:
    """Return a finding that may slow jobs down, or break some."""
    return Finding(check=check, verdict=Verdict.WARN, found=found, advice=advice, host=host)


def fail(check: str, found: str, advice: str, *, host: str = "") -> Finding:
    """Return a finding that keeps jobs from running."""
    return Finding(check=check, verdict=Verdict.FAIL, found=found, advice=advice, host=host)


def show_findings(examination: Examination) -> str:
    """Return a line per finding, with advice if there is any, and a sentence at the end."""
    findings = examination.findings
    width = max((len(_name(finding)) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:<4}  {_name(finding):<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.advice}")
    return "".join(line + "\n" for line in [*lines, "", _sentence(findings)])


def _name(finding: Finding) -> str:
    return f"{finding.check} {finding.host}".rstrip()


def _sentence(findings: Sequence[Finding]) -> str:
    wrong = sum(finding.verdict is Verdict.FAIL for finding in findings)
    doubtful = sum(finding.verdict is Verdict.WARN for finding in findings)
    if wrong:
        return f"{wrong} of {len(findings)} checks found something wrong" + (
            f", {doubtful} a doubt" if doubtful else ""
        )
    return f"{len(findings)} checks found nothing wrong" + (f", {doubtful} a doubt" if doubtful else "")
