"""Torn, edited and made-up files: an error on every rank that names the file, and nothing is restored."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from asyncpar.checkpoint import latest
from asyncpar.errors import CheckpointError
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.checkpoint.layouts import Layout, Tensor, random_bits, small_model
from tests.checkpoint.worlds import each_fails, load_and_check, load_fails, loading, save

SAVED, LOADED = Layout(tp=2), Layout(dp=2)
SHARD, MANIFEST, MARKER = "rank_00001.safetensors", "rank_00001.json", "COMPLETE"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint; copy it before breaking it."""
    folder = tmp_path_factory.mktemp("intact")
    run_virtual(save(folder, small_model(), SAVED, step=3))
    return folder


def damaged(intact: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder of the checkpoint, to be broken."""
    shutil.copytree(intact, tmp_path / "damaged")
    return tmp_path / "damaged" / "step_000000003"


def assert_refused(path: Path, *texts: str, layout: Layout = LOADED) -> None:
    errors = run_virtual(load_fails(path, small_model(), layout))
    for error in errors:
        assert isinstance(error, CheckpointError), repr(error)
        for text in texts:
            assert text in str(error), str(error)


@pytest.mark.parametrize("name", [SHARD, MANIFEST, MARKER])
def test_a_file_that_ends_anywhere_too_early_is_found_out(intact: Path, tmp_path: Path, name: str) -> None:
    """Before and in the header, between tensors, in the last value, at the last byte."""
    path = damaged(intact, tmp_path)
    content = (path / name).read_bytes()

    async def main() -> None:
        async with local_world(2) as nodes:
            for length in sorted({0, 1, 7, 8, 9, 60, len(content) // 2, len(content) - 65, len(content) - 1}):
                (path / name).write_bytes(content[:length])
                for error in await each_fails(nodes, lambda node: loading(node, path, small_model(), LOADED)):
                    assert isinstance(error, CheckpointError), repr(error)
                    assert name in str(error)

    run_virtual(main())


@pytest.mark.parametrize("name", [SHARD, MANIFEST, MARKER])
def test_a_flipped_bit_anywhere_is_found_out(intact: Path, tmp_path: Path, name: str) -> None:
    path = damaged(intact, tmp_path)
    content = (path / name).read_bytes()
    random = Random(name)

    async def main() -> None:
        async with local_world(2) as nodes:
            for position in random.sample(range(len(content)), 40):
                broken = bytearray(content)
                broken[position] ^= 1 << random.randrange(8)
                (path / name).write_bytes(broken)
                for error in await each_fails(nodes, lambda node: loading(node, path, small_model(), LOADED)):
                    assert isinstance(error, CheckpointError), repr(error)
                    assert name in str(error)

    run_virtual(main())


def test_an_edited_value_is_named_with_file_tensor_and_both_hashes(intact: Path, tmp_path: Path) -> None:
    path = damaged(intact, tmp_path)
    content = bytearray((path / SHARD).read_bytes())
    content[-1] ^= 1
    (path / SHARD).write_bytes(content)
    piece = json.loads((path / MANIFEST).read_bytes())["pieces"][-1]
    size = (piece["flat"][1] - piece["flat"][0]) * 4
    found = hashlib.sha256(content[-size:]).hexdigest()
    assert_refused(
        path, str(path / SHARD), f'tensor "{piece["name"]}"', f"expected SHA-256 {piece['blocks'][0]}", found
    )


def test_what_only_one_rank_reads_is_an_error_on_all(tmp_path: Path) -> None:
    """Rank 2 alone reads the damaged block; the others have read all of theirs, and get nothing either."""
    tensors = [Tensor(name="w", whole=random_bits((4 << 18,), np.dtype(np.float32), 1), dim=0)]
    saved = run_virtual(save(tmp_path, tensors, Layout()))
    shard = saved[0].path / "rank_00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-(1 << 20) - 5] ^= 4  # in the third of four blocks
    shard.write_bytes(content)
    errors = run_virtual(load_fails(tmp_path, tensors, Layout(tp=4)))
    assert all(isinstance(error, CheckpointError) and "damaged or edited" in str(error) for error in errors)
    assert [("rank 2 failed" in str(error)) for error in errors] == [True, True, False, True]


def test_a_shard_that_is_missing_is_named(intact: Path, tmp_path: Path) -> None:
    path = damaged(intact, tmp_path)
    (path / SHARD).unlink()
    assert_refused(path, SHARD, "No such file")


def test_shards_that_were_swapped_are_found_out(intact: Path, tmp_path: Path) -> None:
    path = damaged(intact, tmp_path)
    shards = [path / f"rank_0000{rank}.safetensors" for rank in (0, 1)]
    shards[0].rename(path / "other")
    shards[1].rename(shards[0])
    (path / "other").rename(shards[1])
    assert_refused(path, "damaged")


def test_a_folder_that_was_renamed_to_another_step_is_found_out(intact: Path, tmp_path: Path) -> None:
    path = damaged(intact, tmp_path)
    renamed = path.rename(path.with_name("step_000000009"))
    assert_refused(renamed, "step: expected 9 in this folder, got 3")


def test_latest_skips_what_is_damaged_or_unfinished_and_says_so(
    intact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = damaged(intact, tmp_path)
    for step in (4, 5):
        shutil.copytree(path, path.with_name(f"step_00000000{step}"))
    (path.with_name("step_000000004") / MARKER).write_bytes(b"{}")
    (path.with_name("step_000000005") / MARKER).unlink()
    (path.with_name("step_000000006.saving-0123456789abcdef")).mkdir()
    (path.with_name("step_000000007.mine")).mkdir()
    found = latest(path.parent)
    assert found is not None
    assert found.step == 3
    messages = [record.getMessage() for record in caplog.records]
    assert [name in " ".join(messages) for name in ("step_000000004", "5 is", "6.saving", "7.mine")] == [True] * 3 + [
        False
    ]
    run_virtual(load_and_check(path.parent, small_model(), LOADED, step=3))


def test_loading_does_not_silently_fall_back_behind_a_marker_that_it_cannot_read(intact: Path, tmp_path: Path) -> None:
    path = damaged(intact, tmp_path)
    shutil.copytree(path, path.with_name("step_000000004"))
    forge_marker(path.with_name("step_000000004"), put(version=2, step=4))
    assert_refused(path.parent, "written by a newer asyncpar", "to load an older one than step_000000004, say which")
    path.with_name("step_000000004").rename(path.with_name("step_000000002"))
    run_virtual(load_and_check(path.parent, small_model(), LOADED))


# -- made-up texts, with hashes that fit -------------------------------------------------------------------------------


def sealed(body: Any) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"content": body, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def forge_marker(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads((path / MARKER).read_bytes())["content"]
    change(body)
    (path / MARKER).write_bytes(sealed(body))


def forge_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and the marker such that it vouches for the change."""
    manifest = json.loads((path / MANIFEST).read_bytes())
    change(manifest)
    content = json.dumps(manifest).encode()
    (path / MANIFEST).write_bytes(content)
    stamp = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge_marker(path, lambda body: body["manifests"].__setitem__(1, stamp))


def put(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(values)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put(version=2), "written by a newer asyncpar"),
        (put(version=0), "version: expected 1 to 1, got 0"),
        (put(version="1"), "version"),
        (put(format="something else"), "this is no checkpoint"),
        (put(ranks=3), "manifests: expected one for each of 3 ranks"),
        (put(ranks=10**30), "ranks"),
        (put(ranks=0), "ranks"),
        (put(step=-1), "step"),
        (put(step=4), "step: expected 3 in this folder, got 4"),
        (put(manifests=[{"size": 1, "sha256": "../../etc/passwd"}] * 2), "regex"),
        (put(more=1), "unknown field"),
        (put(model=[]), "model"),
    ],
)
def test_a_marker_that_makes_no_sense_is_refused(
    intact: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], text: str
) -> None:
    path = damaged(intact, tmp_path)
    forge_marker(path, change)
    assert_refused(path, MARKER, text)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"nonsense", b"\xff\xfe", b"[" * 100_000, b'{"content": NaN}', b"null"]
)
def test_a_marker_that_is_no_marker_is_refused(intact: Path, tmp_path: Path, content: bytes) -> None:
    path = damaged(intact, tmp_path)
    (path / MARKER).write_bytes(content)
    assert_refused(path, MARKER)


def piece(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["pieces"][0].update(values)


def part(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["pieces"][0]["slice"].update(values)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put(rank=0), "expected the manifest of rank 1"),
        (put(step=4), "at step 4"),
        (put(size=10**9), "size: expected"),
        (put(header_bytes=10), "size: expected"),
        (put(header_bytes=-10), "header_bytes"),
        (put(pieces=[]), "size: expected"),
        (piece(dtype="object"), "dtype 'object' is unknown"),
        (piece(dtype="float16"), "blocks"),
        (piece(flat=[0, 10**12]), "flat: expected a range within"),
        (piece(flat=[-1, 2]), "flat"),
        (piece(flat=[5, 2]), "flat: expected a range within"),
        (piece(flat=[True, 2]), "flat"),
        (piece(shape=[10**9]), "shape: expected"),
        (piece(blocks=[]), "blocks: expected 1 hashes, got 0"),
        (piece(blocks=["0" * 63]), "regex"),
        (piece(name=""), "name"),
        (piece(kind="../value"), "kind"),
        (piece(key="../../elsewhere"), "damaged"),
        (part(start=10**9), "start, stop: expected a range within"),
        (part(dim=7), "dim: expected a dimension"),
        (part(global_shape=[2**60, 2**60], view_shape=[2**60, 2**60]), "dim: expected"),
        (part(local_shape=[1]), "local_shape"),
        (part(global_shape=[2**62]), "global_shape"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_even_if_its_hash_fits(
    intact: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], text: str
) -> None:
    path = damaged(intact, tmp_path)
    forge_manifest(path, change)
    assert_refused(path, "rank_00001" if "damaged" in text else "")
    errors = run_virtual(load_fails(path, small_model(), Layout()))
    assert text in str(errors[0]) or "size: expected" in str(errors[0]), str(errors[0])


def test_a_tensor_may_be_called_like_a_file_somewhere_else(tmp_path: Path) -> None:
    tensors = [Tensor(name="../../etc/passwd\0\n", whole=random_bits((3,), np.dtype(np.float32), 1), dim=0)]
    run_virtual(save(tmp_path / "folder", tensors, Layout(tp=2)))
    run_virtual(load_and_check(tmp_path / "folder", tensors, Layout()))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
