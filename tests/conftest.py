from __future__ import annotations

from collections.abc import Iterator

import pytest
from postgres_cluster import Cluster, find_programs


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A PostgreSQL server."""
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server is not installed here (./setup.sh --tests installs it where it can)")
    cluster = Cluster(programs)
    yield cluster
    cluster.remove()
