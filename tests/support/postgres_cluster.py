"""A PostgreSQL server of the tests' own: made, started and removed by them, reached through a socket in its folder."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, LiteralString

import psycopg

USER = "medsilo"
PASSWORD = "a-password-that-no-log-may-hold"


def find_programs() -> Path | None:
    """The folder of PostgreSQL's server programs; Debian keeps them out of PATH."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), default=None)


class Cluster:
    """``passfile``: where libpq finds the user's password."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        # Not below pytest's folder, which the server's user may not enter; and a socket's path must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="medsilo-pg-"))
        self.passfile = self.folder / "passfile"
        self._databases = 0
        password = self.folder / "password"
        password.write_text(PASSWORD)
        self.passfile.write_text(f"*:*:*:{USER}:{PASSWORD}\n")
        self.passfile.chmod(0o600)
        self._identity: dict[str, Any] = {}
        if os.geteuid() == 0:  # PostgreSQL does not run as root
            users = {user.pw_name: user for user in pwd.getpwall()}
            user = users.get("postgres") or users["nobody"]
            self._identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": ()}
            for path in (self.folder, password):
                shutil.chown(path, user.pw_uid, user.pw_gid)
        self._call(
            "initdb", f"--username={USER}", "--auth=scram-sha-256", f"--pwfile={password}", "--no-sync", "--no-locale",
            "--encoding=UTF8",
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        settings = f"-c listen_addresses= -c unix_socket_directories={self.folder} -c fsync=off"
        self._call("pg_ctl", "--wait", f"--log={self.folder / 'log'}", f"--options={settings}", "start")

    def stop(self) -> None:
        """As a crash would: no connection is ended in good order."""
        self._call("pg_ctl", "--wait", "--mode=immediate", "stop")

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def new_database(self) -> str:
        """The URL of what is as good as an empty database, and made faster: a schema of its own in one."""
        self._databases += 1
        name = f"test{self._databases}"
        self._execute(f"CREATE SCHEMA {name}")
        return f"{self._url('postgres')}&options=-csearch_path%3D{name}"

    def without_encoding(self) -> str:
        """The URL of a database as a server without a locale makes it."""
        self._execute("CREATE DATABASE bare ENCODING 'SQL_ASCII' TEMPLATE template0")
        return self._url("bare")

    def _url(self, database: str) -> str:
        return f"postgresql+psycopg://{USER}@/{database}?host={self.folder}&passfile={self.passfile}"

    def _execute(self, words: LiteralString) -> None:
        with psycopg.connect(
            host=str(self.folder), user=USER, password=PASSWORD, dbname="postgres", autocommit=True
        ) as connection:
            connection.execute(words)

    def _call(self, program: str, *options: str) -> None:
        # pg_ctl's server keeps its output open: what it says goes to a file, which is not waited for.
        with (self.folder / "said").open("w+") as said:
            done = subprocess.run(
                [self._programs / program, f"--pgdata={self.folder / 'data'}", *options],
                cwd=self.folder, stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **self._identity,
            )  # fmt: skip
            said.seek(0)
            assert done.returncode == 0, f"{program}: {said.read()}"
