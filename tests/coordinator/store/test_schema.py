"""The database's tables are made and changed by migrations: nothing is lost, and nothing newer is touched."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text

from medsilo.coordinator.store import schema
from medsilo.coordinator.store.store import Store
from medsilo.coordinator.store.tables import Base
from medsilo.privacy.errors import ConfigurationError, StoreError
from tests.support.postgres_cluster import Cluster

LAST_RELEASE = """
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num));
INSERT INTO alembic_version VALUES ('0004');
CREATE TABLE run (
    name VARCHAR(63) NOT NULL, "plan" VARCHAR NOT NULL, plan_sha256 VARCHAR(64) NOT NULL, memory_file VARCHAR,
    created_at VARCHAR(32) NOT NULL, finished_at VARCHAR(32), PRIMARY KEY (name));
CREATE TABLE member (
    run VARCHAR(63) NOT NULL, silo VARCHAR(63) NOT NULL, accepted BOOLEAN NOT NULL, missing JSON NOT NULL,
    audit_key VARCHAR(64) NOT NULL, certificate_sha256 VARCHAR(64) NOT NULL, answered_at VARCHAR(32) NOT NULL,
    PRIMARY KEY (run, silo));
CREATE TABLE round (
    run VARCHAR(63) NOT NULL, number INTEGER NOT NULL, opened_at VARCHAR(32) NOT NULL, closed_at VARCHAR(32),
    PRIMARY KEY (run, number));
CREATE TABLE participant (
    run VARCHAR(63) NOT NULL, round INTEGER NOT NULL, silo VARCHAR(63) NOT NULL, delivered_at VARCHAR(32),
    late BOOLEAN NOT NULL, file VARCHAR, receipt JSON, accuracy DOUBLE, loss DOUBLE, change_norm DOUBLE,
    change_score DOUBLE, change_cosine DOUBLE, PRIMARY KEY (run, round, silo));
CREATE TABLE download (
    run VARCHAR(63) NOT NULL, silo VARCHAR(63) NOT NULL, files JSON NOT NULL, PRIMARY KEY (run, silo));
CREATE TABLE refusal (
    id INTEGER NOT NULL, at VARCHAR(32) NOT NULL, peer VARCHAR(200) NOT NULL, rpc VARCHAR(32) NOT NULL,
    reason VARCHAR NOT NULL, PRIMARY KEY (id));
CREATE TABLE withdrawal (
    id INTEGER NOT NULL, run VARCHAR(63) NOT NULL, silo VARCHAR(63) NOT NULL, at VARCHAR(32) NOT NULL,
    reason VARCHAR(64) NOT NULL, rounds_used JSON NOT NULL, dropped_round INTEGER, statement JSON NOT NULL,
    renewed_at VARCHAR(32), PRIMARY KEY (id));
CREATE TABLE roster (
    run VARCHAR(63) NOT NULL, round INTEGER NOT NULL, silos JSON NOT NULL, fixed_at VARCHAR(32) NOT NULL,
    PRIMARY KEY (run, round));
CREATE TABLE lease (
    id INTEGER NOT NULL, epoch INTEGER NOT NULL, holder VARCHAR, folder VARCHAR(32), expires_at DATETIME,
    PRIMARY KEY (id));
INSERT INTO lease VALUES (1, 0, NULL, NULL, NULL);
INSERT INTO run VALUES ('r', '{}', 'aa', NULL, '2026-01-01', NULL);
INSERT INTO round VALUES ('r', 0, '2026-01-01', NULL);
INSERT INTO participant VALUES ('r', 0, 'a', '2026-01-02', 0, '0/a', '{"call_id": "ab"}', 0.5, 1.25, 2.5, NULL, NULL);
INSERT INTO withdrawal VALUES (1, 'r', 'b', '2026-01-02', 'why', '[0]', NULL, '{}', NULL);
INSERT INTO roster VALUES ('r', 0, '["a", "b"]', '2026-01-02');
"""
"""What the last release's coordinator (commit 1235ea7) makes of an empty SQLite file, and some rows."""


def assert_as_the_program_expects(url: str) -> None:
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def serve(store: Store, folder: Path) -> bool:
    return store.serve(folder=folder, seconds=60, stopped=threading.Event(), lost=print)


def execute(url: str, statement: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


def tables(url: str) -> set[str]:
    engine = create_engine(url)
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def test_migrations_make_the_tables_that_the_program_expects(url: str) -> None:
    Store(url).close()
    assert_as_the_program_expects(url)


def test_a_database_of_the_last_release_is_taken_over_with_all_that_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as old:
        old.executescript(LAST_RELEASE)
    store = Store(f"sqlite:///{path}")
    state = store.last_round("r")
    assert state is not None
    a = state.participants["a"]
    assert (a.file, a.receipt, a.accuracy, a.loss) == ("0/a", {"call_id": "ab"}, 0.5, 1.25)
    assert set(store.withdrawals("r")) == {"b"}
    assert store.roster("r", 0) == (("a", "b"), "2026-01-02")
    store.fix_roster("r", 1, ["a"])
    store.close()
    assert_as_the_program_expects(f"sqlite:///{path}")


def test_a_new_databases_tables_are_those_that_the_last_release_made_and_later_releases_added_to(
    tmp_path: Path,
) -> None:
    paths = {name: tmp_path / f"{name}.db" for name in ("new", "old")}
    with sqlite3.connect(paths["old"]) as old:
        old.executescript(LAST_RELEASE)
    columns = {}
    for name, path in paths.items():
        Store(f"sqlite:///{path}").close()
        with sqlite3.connect(path) as made:
            found = [row[0] for row in made.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            # all but a column's place, which SQLite gives a later one at the end
            columns[name] = {table: {row[1:] for row in made.execute(f"PRAGMA table_info({table})")} for table in found}
    assert columns["new"] == columns["old"]


def test_a_newer_schema_is_refused_and_left_as_it_is(url: str) -> None:
    Store(url).close()
    execute(url, "UPDATE alembic_version SET version_num = '9999'")
    execute(url, "DROP TABLE download")
    with pytest.raises(ConfigurationError, match=r"schema is 9999.*newer release.*Install that release"):
        Store(url)
    assert "download" not in tables(url)


def test_an_upgrade_that_fails_half_way_changes_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(Operations, "bulk_insert", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Store(url)
    assert tables(url) == set()
    Store(url).close()
    assert_as_the_program_expects(url)


def test_a_newer_release_upgrades_only_when_it_takes_over(
    postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.new_database()
    old = Store(url)
    assert serve(old, tmp_path)
    newer = tmp_path / "migrations"
    shutil.copytree(schema.MIGRATIONS, newer)
    (newer / "versions" / "r9999.py").write_text(
        "from alembic import op\n"
        f"revision, down_revision = '9999', '{schema.revisions()[-1]}'\n"
        "def upgrade():\n"
        "    op.execute('CREATE TABLE newer (id INTEGER)')\n"
    )
    with monkeypatch.context() as release:
        release.setattr(schema, "MIGRATIONS", newer)
        new = Store(url)
        with pytest.raises(StoreError, match="a coordinator of an earlier release is serving"):
            new.runs()
        old.open_run("r", b"{}", "aa")
        assert "newer" not in tables(url)
        old.close()
        assert serve(new, tmp_path)
        assert "newer" in tables(url)
        assert new.runs() == [("r", "{}", None)]
        new.close()
    with pytest.raises(ConfigurationError, match="newer release"):
        Store(url)


def test_the_revisions_by_their_files_names_are_those_that_alembic_walks() -> None:
    walked = [one.revision for one in ScriptDirectory(str(schema.MIGRATIONS)).walk_revisions()]
    assert schema.revisions() == walked[::-1]
