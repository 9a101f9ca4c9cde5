"""Generates the Python code of the message schemas: ``python -m medsilo.protos.generate [--check | --freeze]``.

The generated code is committed; ``--check`` regenerates it in a temporary folder and fails on any difference.
``--freeze`` belongs to a release: it keeps the schemas as those of the release's protocol version.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

from medsilo.protos.versions import PROTOCOL_VERSION, released

ROOT = Path(__file__).parent
SCHEMAS = sorted(ROOT.glob("medsilo/v1/*.proto"))
# protoc writes imports from the schema root; here that root is the package `medsilo.protos`.
_IMPORT = re.compile(r"^from medsilo\.v1", re.MULTILINE)


def generate(out: Path) -> list[Path]:
    """Writes ``*_pb2.py`` and ``*_pb2.pyi`` for every schema below ``out``; returns their paths."""
    _compile(f"--python_out={out}", f"--pyi_out={out}")
    written = sorted(out.glob("medsilo/v1/*_pb2.py*"))
    for path in written:
        path.write_text(_IMPORT.sub("from medsilo.protos.medsilo.v1", path.read_text()))
    return written


def freeze() -> None:
    """Keeps the schemas as those of this protocol version, which is being released.

    A version that was kept before stays as it was: ``SystemExit`` says what to do.
    """
    path = released(PROTOCOL_VERSION)
    if path.exists():
        raise SystemExit(f"{path}: a release spoke version {PROTOCOL_VERSION}; raise it in protos/versions.py first")
    _compile(f"--descriptor_set_out={path}")


def _compile(*outputs: str) -> None:
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    schemas = [str(schema) for schema in SCHEMAS]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *outputs, *schemas]) != 0:
        raise SystemExit("protoc failed; its message stands above")


def drift() -> list[str]:
    """Names of the committed files that differ from what the schemas give."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = {path.relative_to(folder): path.read_bytes() for path in generate(Path(folder))}
    stale = [name for name, content in fresh.items() if not _same(ROOT / name, content)]
    orphans = {path.relative_to(ROOT) for path in ROOT.glob("medsilo/v1/*_pb2.py*")} - set(fresh)
    return sorted(str(name) for name in {*stale, *orphans})


def _same(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def main() -> None:
    """Generates in place, or checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed code is out of date")
    parser.add_argument("--freeze", action="store_true", help="keep the schemas as those of the version released now")
    asked = parser.parse_args()
    if asked.freeze:
        freeze()
        return
    if asked.check:
        if names := drift():
            sys.exit(f"out of date: {', '.join(names)}; run: python -m medsilo.protos.generate")
        return
    generate(ROOT)


if __name__ == "__main__":
    main()
