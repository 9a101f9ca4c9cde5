"""``silo flower``: serves the door to a SuperNode on this machine, until it is stopped or the consent has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from medsilo.privacy.consent.consent import ConsentFile
from medsilo.privacy.consent.gate import ConsentGate
from medsilo.privacy.door.foreign_door import ForeignDoor
from medsilo.privacy.errors import ConfigurationError, ConsentError
from medsilo.privacy.files.durable import on_disk
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.identity.endpoint import split_address
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.journal.records import ConsentRecord
from medsilo.silo.flower.config import FlowerConfig
from medsilo.silo.flower.relay import Relay, missing_for, plan_of
from medsilo.silo.flower.release import read_release
from medsilo.silo.flower.upstream import MEDIA_TYPE, Upstream

_LARGEST_REQUEST = 256 << 20
_IDLE_SECONDS = 120


def serve(config: FlowerConfig, ready: Callable[[], None]) -> None:
    """Serves until the consent has ended; ``ready`` is called once the SuperNode may call.

    Everything that can be wrong on this machine is checked before. Raises the ``MedsiloError`` that says what is wrong.
    """
    with on_disk(config.state):
        keep_private(config.state)
        consent = ConsentFile.read(config.consent)
        if missing := missing_for(consent, plan_of(config, "of any app", "", "")):
            raise consent.refusal(missing, "what `flower: records:` declares, or Flower apps at all")
        if consent.consent.approval == "required":
            raise ConsentError(
                f"{consent.path}: `approval: {consent.consent.approval}` is for runs of Medsilo: a Flower app has no "
                "plan that a person could approve. Take the line out, or do not start this"
            )
        release = read_release(config.flower.python)
        upstream = Upstream(config.coordinator.address, release.version, ca=config.ca, insecure=config.insecure)
        audit_key = load_audit_key(config.keys / "audit.key")

        def note(file: ConsentFile, problem: str | None = None) -> None:
            told: dict[str, Any] = {"unusable": problem} if problem else {}
            door.note(ConsentRecord(consent=file.describe(), data="", data_sha256="", synthetic=False, **told))

        gate = ConsentGate(consent, config.coordinator_identity, changed=note)
        with Journal(config.journal, key=audit_key, origin=config.journal_origin) as journal:
            door = ForeignDoor(
                journal,
                release.schema,
                identity=config.identity.uri,
                federation=config.federation,
                peer=config.coordinator_identity.uri,
                protocol=release.protocol,
            )
            note(consent)
            relay = Relay(config, door, gate, upstream)
            with _listening(config.flower.listen, relay):
                ready()
                relay.ended.wait()
            assert relay.ending is not None
            raise relay.ending


@contextmanager
def _listening(address: str, relay: Relay) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _IDLE_SECONDS
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            length = self.headers.get("content-length", "")
            if not length.isdecimal() or int(length) > _LARGEST_REQUEST:
                self.close_connection = True
                status, content = 413, b"a request has to say its length, and be of at most 256 MiB"
            else:
                status, content = relay.answer(self.path, dict(self.headers), self.rfile.read(int(length)))
            try:
                self.send_response_only(status)
                self.send_header("Content-Type", MEDIA_TYPE if status == 200 else "text/plain")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:  # it waits no longer, and asks again
                self.close_connection = True

    host, port = split_address(address)
    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise ConfigurationError(
            f"flower: listen: {address} cannot be had ({error.strerror}); give another port"
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="door", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
