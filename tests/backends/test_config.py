"""Settings of backends."""

from __future__ import annotations

import pytest

from asyncpar.backends import BackendConfig, CompressionAlgorithm, ReductionOp
from asyncpar.errors import UsageError


def test_the_defaults_are_those_of_the_contract() -> None:
    config = BackendConfig()
    assert config.timeout == 30.0
    assert config.compression == CompressionAlgorithm.none()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout": 0}, "timeout: expected a positive number of seconds or None, got 0"),
        ({"world_size": 0}, "world_size: expected at least 1, got 0"),
        ({"rank": -1}, "rank: expected 0 or more, got -1"),
        ({"rank": 2, "world_size": 2}, r"rank: expected 0\.\.1, got 2"),
        ({"transport": "pigeon"}, "transport: expected one of shm, tcp, grpc, got 'pigeon'"),
        ({"compression": "int8"}, "compression: expected a CompressionAlgorithm, got 'int8'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BackendConfig(**settings)  # type: ignore[arg-type]


def test_reductions_have_the_names_that_communicators_know() -> None:
    assert [op.numeric for op in ReductionOp] == ["sum", "mean", "min", "max", "prod"]
