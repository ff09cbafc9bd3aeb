"""Folders of dumps: the image of each rank, further facts about it, and the same for torch's analyzer."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from asyncpar.core.private_files import make_private_folder, write_private
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.observe.explain import RankFacts, explain
from asyncpar.observe.flight import torch_dumps
from asyncpar.observe.image import RankImage, read_image

_FACTS: Final = "ranks.json"
_PREFIX: Final = "torch_rank_"


class DumpFolder(NamedTuple):
    """Content of a folder; ``problems`` are files that could not be read, and ranks that have none."""

    images: dict[int, RankImage]
    facts: dict[int, RankFacts]
    problems: tuple[str, ...]


def write_dumps(
    folder: Path, images: Mapping[int, bytes], facts: Mapping[int, RankFacts], *, for_torch: bool = False
) -> None:
    """Write the images of ranks into ``folder``, which is created; only this user can read them.

    With ``for_torch``, also write dumps like those of torch's flight recorder.
    """
    make_private_folder(folder)
    for rank, image in images.items():
        write_private(folder / f"rank_{rank}.ring", image)
    write_private(folder / _FACTS, msgspec.json.encode({str(rank): asdict(known) for rank, known in facts.items()}))
    if for_torch:
        write_torch_dumps(folder, {rank: read_image(image) for rank, image in images.items()})


def write_torch_dumps(folder: Path, images: Mapping[int, RankImage]) -> None:
    """Write ``torch_rank_N`` for each rank: ``torchfrtrace -p torch_rank_ FOLDER`` reads them."""
    make_private_folder(folder)
    for rank, dump in torch_dumps(images).items():
        write_private(folder / f"{_PREFIX}{rank}", pickle.dumps(dump))


def read_dumps(folder: Path) -> DumpFolder:
    """Read the output of ``write_dumps``, as far as it exists.  Raises ``UsageError`` for a folder without an image."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: expected a folder of dumps, which `asyncpar flight dump -o` writes")
    images: dict[int, RankImage] = {}
    problems = []
    for file in sorted(folder.glob("rank_*.ring")):
        try:
            image = read_image(file.read_bytes())
        except (OSError, ProtocolError) as error:
            problems.append(f"{file.name}: {error}")
        else:
            images[image.rank] = image
    if not images:
        raise UsageError(f"{folder}: there is no image of a rank (rank_N.ring)" + "".join(f"; {p}" for p in problems))
    facts = _read_facts(folder / _FACTS, problems)
    size = max(image.identity.size for image in images.values())
    problems += [f"rank {rank}: no image" for rank in range(size) if rank not in images]
    return DumpFolder(images, facts, tuple(problems))


def _read_facts(file: Path, problems: list[str]) -> dict[int, RankFacts]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[int, RankFacts])
    except OSError:
        problems.append(f"{file.name}: missing; whether ranks are stopped or dead is not known")
    except msgspec.MsgspecError as error:
        problems.append(f"{file.name}: {error}")
    return {}


def explain_dumps(folder: Path) -> str:
    """Describe what holds up the job whose dumps are in ``folder``."""
    return describe_findings(*read_dumps(folder))


def describe_findings(
    images: Mapping[int, RankImage],
    facts: Mapping[int, RankFacts],
    problems: Sequence[str] = (),
    known: Sequence[str] = (),
) -> str:
    """Describe the findings of ``explain``; ``problems`` are listed after them.

    If it finds nothing, ``known`` counts: the findings of the job's status.
    """
    findings = explain(images, facts)
    lines = [f"{', '.join(f'rank {rank}' for rank in one.culprits)}: {one.cause}\n  {one.text}" for one in findings]
    if not lines:
        lines = list(known)
    if not lines:
        ranks = len(images)
        lines = [f"Nothing holds up the job, as far as {ranks} {'rank' if ranks == 1 else 'ranks'} can tell."]
    return "\n".join([*lines, *(f"(not read: {problem})" for problem in problems)])
