"""gRPC passes over options that it does not know: each one that is set must be one that this release of it has."""

from __future__ import annotations

import re
from pathlib import Path

from grpc._cython import cygrpc

ROOT = Path(__file__).parents[1]


def test_every_option_that_is_set_is_one_that_grpc_knows() -> None:
    library = Path(cygrpc.__file__).read_bytes()
    found = {
        option
        for package in ("silo", "coordinator", "privacy")
        for path in (ROOT / package).rglob("*.py")
        for option in re.findall(r'"(grpc\.[a-z0-9_.]+)"', path.read_text())
    }
    assert len(found) > 10
    assert {option for option in found if option.encode() not in library} == set()
