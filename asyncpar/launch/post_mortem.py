"""The post-mortem of a job on one host: a folder that explains its end, even if the launcher itself was killed.

Theory of operation.  Everything that must outlive a death is in files from the start: the memory of the event rings
(shared maps of files, so the last writes of a rank survive even if it was killed), the last output of each rank,
and a line for each rank that ends.  When the job has failed, the launcher writes the summary in words.  When the
launcher was killed, the reaper starts this module, which does the same.  A job that ends well leaves nothing.

Files in ``DIR/JOB-HOST-PID/``: ``job.json`` (command, host, versions), ``environment.json`` (secrets redacted),
``ends.jsonl``, ``rings/GENERATION-RANK.ring``, ``logs/GENERATION-RANK.{stdout,stderr}`` (and ``.1``, the part before),
``stacks/GENERATION-RANK.txt`` (the stacks of ranks when the job began to end; ``.dump``: those written at a crash)
and ``summary.txt``.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncpar import __version__
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.observe.records import image_bytes
from asyncpar.core.private_files import append_private, make_private_folder, open_private, remove_tree, write_private
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.harmless import harmless
from asyncpar.launch.failure import RankEnd
from asyncpar.observe.chains import show_stacks
from asyncpar.observe.explain import RankFacts, explain
from asyncpar.observe.image import Event, RankImage, read_image
from asyncpar.observe.stack_views import ProcessStacks, parse_dump

LOG_BYTES: Final = 1 << 20
"""Approximate number of bytes of each stream of each rank that are kept."""

_SECRET: Final = re.compile(r"secret|token|passw|credential|api_?key|private|auth", re.IGNORECASE)
_URL_PASSWORD: Final = re.compile(r"(\w+://[^/\s:@]+:)[^@\s]+@")
_FRAME_LINE: Final = re.compile(r"\s+.*:\d+ in ")
_REDACTED: Final = "<redacted>"
_SHOWN_EVENTS: Final = 3


class TailFile:
    """A file that keeps the last ``LOG_BYTES`` of the data written to it, in itself and in ``NAME.1``.

    When it cannot be written (a full disk), it ignores further data: the job goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._descriptor: int | None = None
        self._open()

    def write(self, chunk: bytes) -> None:
        """Append ``chunk``."""
        if self._descriptor is None:
            return
        try:
            if self._size + len(chunk) > LOG_BYTES // 2 and self._size:
                os.close(self._descriptor)
                os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
                self._open()
            os.write(self._descriptor, chunk[-LOG_BYTES // 2 :])
            self._size += len(chunk)
        except OSError:
            self.close()

    def close(self) -> None:
        """Ignore further data.  Idempotent."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):
                os.close(descriptor)

    def _open(self) -> None:
        self._size = 0
        self._descriptor = None
        with suppress(OSError):
            self._descriptor = open_private(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


class PostMortem:
    """The folder of one launcher.  ``open`` it before ranks start; ``finish`` it at the end of the job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problem = ""
        """Why the summary could not be written, "" if it was."""

    @classmethod
    def open(
        cls,
        directory: str,
        *,
        job: str,
        host: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        process: str = "launcher",
    ) -> PostMortem:
        """Create the folder.  Raises ``UsageError`` if ``directory`` cannot be written.

        ``process`` is the kind of process that runs the ranks here: a launcher, or an agent.
        """
        folder = Path(directory).absolute() / f"{_plain(job)}-{_plain(host)}-{os.getpid()}"
        try:
            for part in ("rings", "logs", "stacks"):
                make_private_folder(folder / part, under=folder.parent)
            folder.chmod(0o700)
            _write(folder / "environment.json", json.dumps(redacted(environment), indent=1, sort_keys=True))
            described = {
                "job": job,
                "host": host,
                "process": process,
                "command": [_URL_PASSWORD.sub(rf"\1{_REDACTED}@", word) for word in command],
                "pid": os.getpid(),
                "started": time.time(),
                "python": platform.python_version(),
                "system": platform.platform(),
                "asyncpar": __version__,
            }
            _write(folder / "job.json", json.dumps(described, indent=1))
        except OSError as error:
            raise UsageError(f"--post-mortem: {directory} cannot be written: {os_reason(error)}") from error
        return cls(folder)

    def make_ring(self, place: LaunchEnvironment) -> int:
        """Return a descriptor of the memory for the events of a rank.  Raises ``OSError`` if the disk is full."""
        path = self.folder / "rings" / f"{_name(place.generation, place.rank)}.ring"
        descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            _allocate(descriptor, image_bytes())
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return descriptor

    def make_stack_file(self, place: LaunchEnvironment) -> int:
        """Return a descriptor of the file to which a rank writes its stacks when it crashes or does not answer."""
        path = self.folder / "stacks" / f"{_name(place.generation, place.rank)}.dump"
        return open_private(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def add_stacks(self, generation: int, stacks: ProcessStacks) -> None:
        """Keep the stacks of a rank, as they were when the job began to end."""
        path = self.folder / "stacks" / f"{_name(generation, stacks.rank)}.txt"
        with suppress(OSError):
            _write(path, show_stacks({stacks.rank: stacks}, {}))

    def open_log(self, place: LaunchEnvironment, stream: str) -> TailFile:
        """Return the file for the last output of a rank; ``stream`` is stdout or stderr."""
        return TailFile(self.folder / "logs" / f"{_name(place.generation, place.rank)}.{stream}")

    def add_end(self, end: RankEnd) -> None:
        """Record the end of a rank."""
        report = end.report
        line = {
            "generation": end.generation,
            "rank": end.rank,
            "host": end.host,
            "pid": end.pid,
            "returncode": end.returncode,
            "ending": end.ending,
            "at": end.at,
            "type": None if report is None else report.type_name,
            "message": None if report is None else report.message,
            "traceback": None if report is None else report.traceback,
            "is_peer_error": end.is_peer_error,
            "blames": end.blames,
        }
        with suppress(OSError):
            append_private(self.folder / "ends.jsonl", (json.dumps(line) + "\n").encode())

    def finish(self, *, has_failed: bool, message: str = "") -> Path | None:
        """Write the summary and return the folder; remove it if nothing has failed."""
        if not has_failed:
            remove_tree(self.folder)
            with suppress(OSError):
                self.folder.parent.rmdir()  # if it is empty and was created for this
            return None
        try:
            _write(self.folder / "summary.txt", summarize(self.folder, message=message))
        except OSError as error:
            self.problem = f"{self.folder} has no summary: {os_reason(error)}"
            return None
        return self.folder

    def describe(self) -> str:
        """Return the notice about the finished post-mortem, "" for none."""
        if self.problem:
            return f"post-mortem: {self.problem}"
        return f"post-mortem: {self.folder}" if self.folder.is_dir() else ""


def redacted(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without passwords in addresses and the values of variables whose names sound secret."""
    return {
        name: _REDACTED if _SECRET.search(name) else _URL_PASSWORD.sub(rf"\1{_REDACTED}@", value)
        for name, value in environment.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankRemains:
    """The contents of the folder for one rank in one generation."""

    generation: int
    rank: int
    image: RankImage | None
    end: Mapping[str, Any] | None
    problem: str = ""


def summarize(folder: Path, *, message: str = "") -> str:
    """Summarize ``folder`` in words; missing or torn files are named, and do not prevent the summary."""
    job = _read_json(folder / "job.json")
    ends = list(_read_lines(folder / "ends.jsonl"))
    lines = [f"Post-mortem of job {job.get('job', '?')} on {job.get('host', socket.gethostname())}"]
    if "command" in job:
        lines.append(f"  command: {' '.join(job['command'])}")
    if "started" in job:
        lines.append(f"  started: {_day(job['started'])}, asyncpar {job.get('asyncpar', '?')}")
    if message:
        lines += ["", *message.splitlines()]
    else:
        lines += ["", _describe_killed(job)]
    remains = _remains(folder, ends)
    lines += _findings(remains)
    for generation in sorted({each.generation for each in remains}):
        lines += ["", f"Generation {generation}"]
        for each in remains:
            if each.generation == generation:
                lines += [*_rank_lines(each), *_stack_lines(folder, each)]
    lines += ["", "Other files here: stacks/, rings/ (event rings), logs/ (the last output), environment.json"]
    return "\n".join(lines) + "\n"


def _describe_killed(job: Mapping[str, Any]) -> str:
    """Return the statement that the process which ran the ranks was killed: which one, and on which host."""
    who = str(job.get("process", "launcher"))
    who += f" on {job['host']}" if "host" in job else ""
    who += f" (pid {job['pid']})" if "pid" in job else ""
    return f"The {who} was killed, or could not report anything: its ranks ended with it."


def _findings(remains: Sequence[_RankRemains]) -> list[str]:
    """Return which ranks held up which in the last generation, as far as its rings show."""
    last = max((each.generation for each in remains), default=0)
    images = {each.rank: each.image for each in remains if each.generation == last and each.image is not None}
    if not any(image.pending for image in images.values()):
        return []
    facts = {
        each.rank: RankFacts(condition="ended", detail=str(each.end.get("ending", "")))
        for each in remains
        if each.generation == last and each.end is not None
    }
    return ["", *(finding.text for finding in explain(images, facts))]


def _remains(folder: Path, ends: Sequence[Mapping[str, Any]]) -> list[_RankRemains]:
    found: dict[tuple[int, int], _RankRemains] = {}
    by_rank = {(end.get("generation", 0), end.get("rank", -1)): end for end in ends}
    for path in sorted((folder / "rings").glob("*.ring")):
        generation, _, rank = path.stem.partition("-")
        key = (int(generation), int(rank))
        image, problem = None, ""
        try:
            image = read_image(path.read_bytes())
        except ProtocolError as error:
            problem = f"its ring cannot be read: {error}"
            if not any(path.read_bytes()[:8]):
                problem = "it has made no node"
        except OSError as error:
            problem = f"its ring cannot be read: {os_reason(error)}"
        found[key] = _RankRemains(generation=key[0], rank=key[1], image=image, end=by_rank.get(key), problem=problem)
    for key, end in by_rank.items():
        if key not in found:
            found[key] = _RankRemains(
                generation=key[0], rank=key[1], image=None, end=end, problem="its ring is missing"
            )
    return [found[key] for key in sorted(found)]


def _rank_lines(remains: _RankRemains) -> list[str]:
    end = remains.end
    ending = "no end of it was seen" if end is None else str(end.get("ending", "?"))
    if end is not None and end.get("type"):
        first = str(end.get("message") or "").strip().splitlines()
        ending += f": {end['type']}" + (f": {first[0]}" if first else "")
    lines = [f"  rank {remains.rank}: {ending}"]
    if remains.image is None:
        return [*lines, f"    {remains.problem}"]
    image = remains.image
    lines.append(f"    last sign: {_day(image.wall(image.last_at))}")
    lines += [f"    under way: {_describe(event, image)}" for event in image.pending[:_SHOWN_EVENTS]]
    if len(image.pending) > _SHOWN_EVENTS:
        lines.append(f"    and {len(image.pending) - _SHOWN_EVENTS} more")
    if not image.pending and image.operations:
        last = image.operations[-1]
        lines.append(f"    last operation: {_describe(last, image)}, {last.state.name.lower()}")
    return lines


def _stack_lines(folder: Path, remains: _RankRemains) -> list[str]:
    """Return the place of a rank: by the stacks that it reported, or by those that it wrote when it crashed."""
    name = _name(remains.generation, remains.rank)
    fatal, threads = parse_dump(_read_text(folder / "stacks" / f"{name}.dump"))
    if fatal:
        frames = next((thread.frames for thread in threads if thread.is_main), ())
        frame = next((frame for frame in reversed(frames) if frame.is_user), None)
        return [f"    stack: {fatal}" + (f", at {frame.site} in {frame.function}" if frame is not None else "")]
    lines = _read_text(folder / "stacks" / f"{name}.txt").splitlines()
    if "waits:" in lines:
        found = [line.strip() for line in lines[lines.index("waits:") + 1 :]]
        return [f"    stack: {line}" for line in found[: found.index("")] or found][:_SHOWN_EVENTS]
    sites = [line.strip() for line in lines if _FRAME_LINE.match(line)]
    return [f"    stack: {sites[-1]}"] if sites else []


def _describe(event: Event, image: RankImage) -> str:
    group = image.groups.get(event.group)
    of = f" of {group.name}" if group is not None and event.is_operation else ""
    where = f", called at {event.site}" if event.site is not None else ""
    since = "" if event.is_over else f", for {max(0.0, image.last_at - event.created):.3f} s"
    return f"{event.label}{of}{where}{since}"


def _name(generation: int, rank: int) -> str:
    return f"{generation}-{rank}"


def _allocate(descriptor: int, size: int) -> None:
    """Allocate ``size`` bytes of the disk to the file now: otherwise a full disk would kill the rank that writes.

    Where the system cannot do that, zeros are written.  Raises ``OSError``.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(bytes(size))


def _plain(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)[:60] or "job"


def _day(seconds: float) -> str:
    moment = time.localtime(seconds)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', moment)}.{int(seconds % 1 * 1000):03d}"


def _write(path: Path, text: str) -> None:
    """Write a file that only this user can read, whole or not at all, without control sequences for terminals."""
    write_private(path, harmless(text).encode())


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_lines(path: Path) -> Iterable[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    for line in text.splitlines():
        with suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, dict):
                yield content


def main() -> None:
    """Write the summary of the folder in ``sys.argv[1]``, whose launcher was killed; the reaper runs this."""
    folder = Path(sys.argv[1])
    if folder.is_dir():
        _write(folder / "summary.txt", summarize(folder))


if __name__ == "__main__":
    main()
