"""What of a Flower app's replies passes the door, and what does not; without Flower's processes, with its schemas."""

from __future__ import annotations

import base64
import collections
import hashlib
import io
import json
import pickle
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.consent.consent import ConsentFile
from medsilo.privacy.consent.gate import ConsentGate
from medsilo.privacy.door.foreign_door import ForeignDoor, ForeignSchema
from medsilo.privacy.errors import ConfigurationError, ConsentError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.privacy.journal.records import ConsentRecord
from medsilo.silo.flower.config import FlowerConfig
from medsilo.silo.flower.objects import Reply, ReplyReader, object_id
from medsilo.silo.flower.relay import WITHHELD, Relay, missing_for, plan_of
from medsilo.silo.flower.release import _DUMP, RPCS, SCHEMAS, TRIED, Release, read_release
from medsilo.silo.flower.serving import serve
from medsilo.silo.flower.upstream import NodeHeaders, Upstream

DECLARED = {
    "arrays": {"head.bias": Exposure.MODEL_PARAMETERS_CLASSIFIER, "*": Exposure.MODEL_PARAMETERS_EXTRACTOR},
    "metrics": {"num-examples": Exposure.SAMPLE_COUNT, "loss": Exposure.LOCAL_METRICS},
}
CONSENT = {
    "coordinator": "spiffe://test/coordinator/superlink",
    "methods": ["flower"],
    "exposures": ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "SAMPLE_COUNT", "LOCAL_METRICS", "PEER_DERIVED"],
    "rounds": 2,
}
KEY = ec.generate_private_key(ec.SECP384R1())
PEM = KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture(scope="module")
def release(flower_python: Path) -> Release:
    return read_release(flower_python)


@pytest.fixture(scope="module")
def schema(release: Release) -> ForeignSchema:
    return release.schema


class Objects:
    """A reply, made object by object as Flower has them."""

    def __init__(self, schema: ForeignSchema) -> None:
        self.schema = schema
        self.contents: dict[str, bytes] = {}
        self.metadata = schema.make("flwr.proto.Metadata")
        self.metadata.run_id, self.metadata.reply_to_message_id, self.metadata.message_type = 7, "ab" * 32, "train"
        self.tree = schema.make("flwr.proto.ObjectTree")

    def put(self, kind: str, body: bytes, *children: str) -> str:
        content = f"{kind} {','.join(children)} {len(body)}".encode() + b"\0" + body
        self.contents[object_id(content)] = content
        return object_id(content)

    def array(self, array: Any, *, data: bytes | None = None, **said: Any) -> str:
        if data is None:
            file = io.BytesIO()
            np.save(file, array)
            data = file.getvalue()
        found = {"dtype": str(array.dtype), "shape": list(array.shape), "stype": "numpy.ndarray", "arraychunk_ids": [0]}
        return self.put("Array", json.dumps({**found, **said}).encode(), self.put("ArrayChunk", data))

    def arrays(self, **arrays: str) -> str:
        return self.put("ArrayRecord", json.dumps(arrays).encode(), *dict.fromkeys(arrays.values()))

    def values(self, kind: str, **values: Any) -> str:
        record = self.schema.make(f"flwr.proto.{kind}")
        for name, value in values.items():
            item = record.items.add(key=name)
            field = {int: "sint64", float: "double", str: "string", bytes: "bytes"}[type(value)]
            setattr(item.value, field, value)
        return self.put(kind, record.SerializeToString())

    def reply(self, **records: str) -> None:
        self.message(self.put("RecordDict", json.dumps(records).encode(), *dict.fromkeys(records.values())))

    def message(self, *children: str, error: str | None = None) -> None:
        message = self.schema.make("flwr.proto.Message")
        message.metadata.CopyFrom(self.metadata)
        if error is not None:
            message.error.code, message.error.reason = 2, error
        root = self.put("Message", message.SerializeToString(deterministic=True), *children)
        self.metadata.message_id = root
        self.tree.Clear()
        self.grow(self.tree, root)

    def grow(self, node: Any, name: str) -> None:
        node.object_id = name
        children = self.contents[name].partition(b"\0")[0].decode().split(" ")[1] if name in self.contents else ""
        for child in filter(None, children.split(",")):
            self.grow(node.children.add(), child)

    def read(self, declared: Mapping[str, Mapping[str, Exposure]] = DECLARED) -> Reply:
        return ReplyReader(self.schema, declared, self.contents, self.tree, self.metadata).read()


@pytest.fixture
def objects(schema: ForeignSchema) -> Objects:
    return Objects(schema)


def trained(objects: Objects, **metrics: Any) -> None:
    weight, bias = np.arange(6, dtype=np.float32).reshape(3, 2), np.zeros(2)
    objects.reply(
        arrays=objects.arrays(**{"body.weight": objects.array(weight), "head.bias": objects.array(bias)}),
        metrics=objects.values("MetricRecord", **{"num-examples": 12, "loss": 0.5, **metrics}),
    )


def test_each_byte_of_a_reply_has_its_declared_class(objects: Objects) -> None:
    trained(objects)
    reply = objects.read()
    total: collections.Counter[Exposure] = collections.Counter()
    for name, parts in reply.parts.items():
        assert sum(parts.values()) == len(objects.contents[name])
        total.update(parts)
    assert total[Exposure.MODEL_PARAMETERS_EXTRACTOR] == 128 + 6 * 4
    assert total[Exposure.MODEL_PARAMETERS_CLASSIFIER] == 128 + 2 * 8  # the longest name that fits, not `*`
    assert list(reply.parts)[-1] == objects.tree.object_id  # children before parents
    assert reply.tensors[0] == {
        "class": "MODEL_PARAMETERS_EXTRACTOR",
        "name": "arrays/body.weight",
        "shape": [3, 2],
        "dtype": "float32",
    }


def array_of_text(objects: Objects) -> str:
    return objects.array(np.array(["patient 4711"]))


def pickled(objects: Objects) -> str:
    file = io.BytesIO()
    np.save(file, np.array([{"patient": 4711}], dtype=object), allow_pickle=True)
    return objects.array(np.zeros(1), data=file.getvalue())


def bytes_behind(objects: Objects) -> str:
    file = io.BytesIO()
    np.save(file, np.zeros(2))
    return objects.array(np.zeros(2), data=file.getvalue() + b"patient")


def words_in_the_header(objects: Objects) -> str:
    file = io.BytesIO()
    np.save(file, np.zeros(2))
    return objects.array(np.zeros(2), data=file.getvalue().replace(b"}       ", b"}#patient"[:8], 1))


def another_shape(objects: Objects) -> str:
    return objects.array(np.zeros(2), shape=[4711, 2])


def more_in_the_description(objects: Objects) -> str:
    return objects.array(np.zeros(2), patient=4711)


@pytest.mark.parametrize(
    "make", [array_of_text, pickled, bytes_behind, words_in_the_header, another_shape, more_in_the_description]
)
def test_an_array_that_is_not_plain_numbers_does_not_leave(objects: Objects, make: Callable[[Objects], str]) -> None:
    objects.reply(arrays=objects.arrays(weight=make(objects)))
    with pytest.raises(RefusedError, match="array 'weight' of record 'arrays'"):
        objects.read()


def test_nothing_in_an_array_is_run(objects: Objects, tmp_path: Path) -> None:
    class Deed:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "done",)

    objects.reply(arrays=objects.arrays(weight=objects.array(np.zeros(1), data=pickle.dumps(Deed()))))
    with pytest.raises(RefusedError, match="NumPy's form"):
        objects.read()
    assert not (tmp_path / "done").exists()


def undeclared_metric(objects: Objects) -> None:
    trained(objects, age=71.0)


def text(objects: Objects) -> None:
    objects.reply(metrics=objects.values("ConfigRecord", loss="patient 4711"))


def unknown_record(objects: Objects) -> None:
    objects.reply(extra=objects.values("MetricRecord", loss=0.5))


def unknown_field(objects: Objects) -> None:
    body = objects.contents[objects.values("MetricRecord", loss=0.5)].partition(b"\0")[2]
    objects.reply(metrics=objects.put("MetricRecord", body + b"\x9a\x06\x04data"))


def spaces_between_the_lines(objects: Objects) -> None:
    record = objects.values("MetricRecord", loss=0.5)
    objects.message(objects.put("RecordDict", json.dumps({"metrics": record}, indent=7).encode(), record))


def stray_object(objects: Objects) -> None:
    trained(objects)
    objects.put("ArrayChunk", b"patient 4711")


def another_tree(objects: Objects) -> None:
    trained(objects)
    objects.tree.children.add().object_id = "cd" * 32


def other_metadata(objects: Objects) -> None:
    trained(objects)
    objects.metadata.run_id = 8


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (undeclared_metric, "the metric 'age' of record 'metrics' is not declared"),
        (text, "is text: only numbers can be attributed"),
        (unknown_record, "'loss' of record 'extra' is not declared"),
        (unknown_field, "fields that the schema does not know"),
        (spaces_between_the_lines, "no known form"),
        (stray_object, "objects that are no part of it"),
        (another_tree, "other parts than were announced"),
        (other_metadata, "not the one that was announced"),
    ],
)
def test_what_is_not_declared_or_could_hide_something_does_not_leave(
    objects: Objects, make: Callable[[Objects], None], reason: str
) -> None:
    make(objects)
    with pytest.raises(RefusedError, match=reason):
        objects.read()


class Server:
    """Stands for Flower's server: keeps what it gets, and answers as it would."""

    def __init__(self, schema: ForeignSchema) -> None:
        self.got: list[tuple[str, Any]] = []
        self.status = 200
        self.promised: int | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                rpc = RPCS[self.path]
                body = self.rfile.read(int(self.headers["content-length"]))
                request, _ = schema.read(body, rpc.request)
                server.got.append((rpc.name, request))
                answer = schema.make(rpc.response)
                if rpc.name == "PullMessages":
                    metadata = answer.messages_list.add().metadata
                    metadata.run_id, metadata.message_id, metadata.message_type = 7, "ab" * 32, "train"
                elif rpc.name == "PushMessages":
                    announced: list[Any] = list(request.message_object_trees)
                    for node in announced:
                        answer.objects_to_push.append(node.object_id)
                        announced.extend(node.children)
                    answer.session_id = "session"
                elif rpc.name == "PushObject":
                    answer.stored = True
                self.send_response(server.status)
                if server.promised is not None:
                    self.send_header("Content-Length", str(server.promised))
                self.end_headers()
                self.wfile.write(answer.SerializeToString())

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def names(self) -> list[str]:
        return [name for name, _ in self.got]


class Hospital:
    """A door with its journal, and a SuperNode's side of it."""

    def __init__(self, folder: Path, schema: ForeignSchema, server: Server) -> None:
        self.schema = schema
        self.folder = folder
        self.consent = folder / "consent.yaml"
        self.consent.write_text(yaml.safe_dump(CONSENT))
        config = folder / "hospital1.yaml"
        settings = {
            "federation": "test",
            "name": "hospital1",
            "state": "state",
            "coordinator": {"address": f"127.0.0.1:{server.http.server_port}", "name": "superlink"},
            "insecure": True,
            "consent": "consent.yaml",
            "flower": {"python": "python", "records": {name: dict(record) for name, record in DECLARED.items()}},
        }
        config.write_text(yaml.safe_dump(json.loads(json.dumps(settings))))
        self.config = FlowerConfig.read(config)
        self.key = Ed25519PrivateKey.generate()
        self.open()

    def open(self) -> None:
        identity, peer = self.config.identity.uri, self.config.coordinator_identity
        self.journal = Journal(self.folder / "journal", key=self.key, origin=self.config.journal_origin)
        door = ForeignDoor(
            self.journal, self.schema, identity=identity, federation="test", peer=peer.uri, protocol="Flower"
        )
        file = ConsentFile.read(self.consent)
        door.note(ConsentRecord(consent=file.describe()))
        upstream = Upstream(self.config.coordinator.address, TRIED[-1], ca=None, insecure=True)
        self.relay = Relay(self.config, door, ConsentGate(file, peer), upstream)

    def ask(self, name: str, request: Any, **headers: str) -> tuple[int, bytes]:
        path = next((path for path, rpc in RPCS.items() if rpc.name == name), name)
        time = datetime.now(UTC).isoformat()
        own = {
            "Flwr-Package-Name": "flwr",
            "Flwr-Package-Version": TRIED[-1],
            "Flwr-Public-Key": base64.b64encode(PEM).decode(),
            "Flwr-Timestamp": time,
            "Flwr-Signature": base64.b64encode(KEY.sign(time.encode(), ec.ECDSA(hashes.SHA256()))).decode(),
            **headers,
        }
        return self.relay.answer(path, own, request if isinstance(request, bytes) else request.SerializeToString())

    def pull(self) -> tuple[int, bytes]:
        return self.ask("PullMessages", self.schema.make("flwr.proto.PullMessagesRequest"))

    def push(self, objects: Objects, *, error: str = "") -> tuple[int, bytes]:
        """A reply as a SuperNode pushes it; the answer to its last object."""
        request = self.schema.make("flwr.proto.PushMessagesRequest")
        message = request.messages_list.add()
        message.metadata.CopyFrom(objects.metadata)
        message.content.SetInParent()
        if error:
            message.ClearField("content")
            message.error.code, message.error.reason = 2, error
        request.message_object_trees.add().CopyFrom(objects.tree)
        request.clientapp_runtime_list.append(12.5)
        status, content = self.ask("PushMessages", request)
        assert status == 200, content
        answer, _ = self.schema.read(content, "flwr.proto.PushMessagesResponse")
        for name in answer.objects_to_push:
            push = self.schema.make("flwr.proto.PushObjectRequest")
            push.run_id, push.object_id, push.object_content = 7, name, objects.contents[name]
            push.session_id = answer.session_id
            status, content = self.ask("PushObject", push)
        return status, content

    def last_refusal(self) -> str:
        found = [record for record in read_records(self.folder / "journal") if record["kind"] == "refusal"]
        return str(found[-1]["reason"])

    def verified(self) -> str:
        self.journal.close()
        found = verify_evidence(self.folder / "journal")
        self.open()
        return found.problem


@pytest.fixture
def server(schema: ForeignSchema) -> Iterator[Server]:
    one = Server(schema)
    yield one
    one.http.shutdown()
    one.http.server_close()


@pytest.fixture
def hospital(tmp_path: Path, schema: ForeignSchema, server: Server) -> Iterator[Hospital]:
    one = Hospital(tmp_path, schema, server)
    yield one
    one.journal.close()


def test_nothing_of_a_reply_leaves_before_it_is_whole(hospital: Hospital, server: Server, objects: Objects) -> None:
    hospital.pull()
    trained(objects)
    missing = objects.contents.pop(objects.tree.object_id)
    with pytest.raises(KeyError):
        hospital.push(objects)
    assert server.names() == ["PullMessages"]
    objects.contents[objects.tree.object_id] = missing
    assert hospital.push(objects)[0] == 200
    assert server.names() == ["PullMessages", "PushMessages", *["PushObject"] * len(objects.contents)]
    assert server.got[1][1].clientapp_runtime_list == [0.0]
    assert hospital.verified() == ""


def test_what_is_refused_reaches_the_server_as_an_error_without_words(
    hospital: Hospital, server: Server, objects: Objects
) -> None:
    hospital.pull()
    undeclared_metric(objects)
    status, content = hospital.push(objects)
    assert status == 422
    assert b"'age' of record 'metrics' is not declared" in content
    assert "'age' of record 'metrics' is not declared" in hospital.last_refusal()
    sent = b"".join(request.SerializeToString() for _, request in server.got)
    assert b"age" not in sent.replace(b"Message", b"")
    assert not any(name.encode() in sent for name in objects.contents)  # nor what it was, by its hashes
    (message,) = server.got[1][1].messages_list
    assert (message.error.code, message.error.reason) == (6, WITHHELD)
    assert hospital.verified() == ""


def test_an_errors_words_stay_here(hospital: Hospital, server: Server, objects: Objects) -> None:
    hospital.pull()
    objects.message(error="no such file: /images/4711.dcm")
    assert hospital.push(objects, error="no such file: /images/4711.dcm")[0] == 200
    sent = b"".join(request.SerializeToString() for _, request in server.got)
    assert b"4711" not in sent
    assert sent.count(WITHHELD.encode()) == 2  # in the announcement and in the object


def test_the_round_cap_holds_over_restarts(hospital: Hospital, server: Server, schema: ForeignSchema) -> None:
    for number in range(3):
        hospital.journal.close()
        hospital.open()
        hospital.pull()
        objects = Objects(schema)
        trained(objects, loss=float(number))
        assert hospital.push(objects)[0] == (422 if number == 2 else 200)
    assert "allows 2 rounds" in hospital.last_refusal()
    assert hospital.verified() == ""


def test_a_consent_that_is_narrowed_counts_from_the_next_message_on(
    hospital: Hospital, server: Server, objects: Objects
) -> None:
    hospital.pull()
    hospital.consent.write_text(yaml.safe_dump({**CONSENT, "exposures": CONSENT["exposures"][:3]}))  # type: ignore[index]
    trained(objects)
    assert hospital.push(objects)[0] == 422
    hospital.consent.write_text(yaml.safe_dump({**CONSENT, "exposures": []}))
    before = len(server.got)
    assert hospital.pull()[0] == 422
    assert len(server.got) == before
    assert hospital.relay.ended.is_set()
    assert isinstance(hospital.relay.ending, ConsentError)
    with pytest.raises(ConsentError, match="exposure class SAMPLE_COUNT"):
        serve(hospital.config, ready=pytest.fail)


def test_a_door_without_consent_to_flower_does_not_open(hospital: Hospital) -> None:
    for change, missing in (
        ({"methods": []}, "method flower"),
        ({"rounds": 0}, "1 rounds"),
        (
            {"approval": "required"},
            "no plan that a person could approve",
        ),
    ):
        hospital.consent.write_text(yaml.safe_dump({**CONSENT, **change}))
        with pytest.raises(ConsentError, match=missing):
            serve(hospital.config, ready=pytest.fail)


def test_an_answer_that_is_cut_short_is_none(hospital: Hospital, server: Server) -> None:
    server.promised = 99
    assert hospital.pull()[0] == 503


def test_a_reply_to_nothing_that_was_asked_is_refused(hospital: Hospital, server: Server, objects: Objects) -> None:
    trained(objects)
    with pytest.raises(AssertionError, match="reply to no message"):
        hospital.push(objects)
    hospital.pull()
    objects.metadata.group_id = "patient 4711"
    trained(objects)
    with pytest.raises(AssertionError, match="does not repeat"):
        hospital.push(objects)
    assert server.names() == ["PullMessages"]


def test_unknown_calls_fields_texts_and_releases_do_not_pass(hospital: Hospital, server: Server) -> None:
    schema = hospital.schema
    pull = schema.make("flwr.proto.PullMessagesRequest")
    named = schema.make("flwr.proto.PullMessagesRequest")
    named.message_ids.append("patient 4711")
    fab = schema.make("flwr.proto.GetFabRequest")
    fab.hash_str = "patient 4711"
    register = schema.make("flwr.proto.RegisterNodeFleetRequest")
    register.public_key = PEM + b"patient 4711"
    for name, request, headers, reason in (
        ("/v1/control/start-run", b"", {}, "no call that the door knows"),
        ("PullMessages", pull.SerializeToString() + b"\x9a\x06\x01x", {}, "unknown field 99"),
        ("PullMessages", named, {}, "asks for messages by name"),
        ("GetFab", fab, {}, "hash_str is no hash"),
        ("RegisterNode", register, {}, "no public key|not a plain"),
        (
            "PullMessages",
            pull,
            {"Flwr-Package-Version": "1.43.0"},
            "flwr 1.43.0; .* has flwr 1.42.0, which alone passes",
        ),
        ("PullMessages", pull, {"Flwr-Timestamp": "2026-01-01T00:00:00+00:00"}, "key and signed time"),
    ):
        status, content = hospital.ask(name, request, **headers)
        assert status == 422
        assert re.search(reason, content.decode()), content
        assert re.search(reason, hospital.last_refusal())
    assert server.got == []


def test_a_server_that_refuses_is_on_record(hospital: Hospital, server: Server) -> None:
    server.status = 401
    assert hospital.pull()[0] == 401
    assert "answered 401 to PullMessages" in hospital.last_refusal()


def installed(
    tmp_path: Path,
    flower_python: Path,
    version: str,
    *,
    http: bool = True,
    change: Mapping[str, bytes | None] | None = None,
) -> Path:
    """A Python that has a flwr of a version, with the schemas of the real one but for what is changed."""
    real = json.loads(subprocess.check_output([flower_python, "-I", "-c", _DUMP], text=True))
    files = {name: base64.b64decode(file) for name, file in real["files"].items()} | dict(change or {})
    told = {name: base64.b64encode(file).decode() for name, file in files.items() if file is not None}
    python = tmp_path / "python"
    (tmp_path / "told.json").write_text(json.dumps({"version": version, "http": http, "files": told}))
    python.write_text(f"#!/bin/sh\ncat '{tmp_path / 'told.json'}'\n")
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("version", ["1.38.0", "1.41.0", "1.42.0", "1.57.3"])
def test_a_release_passes_by_its_messages_whatever_its_version(
    tmp_path: Path, flower_python: Path, schema: ForeignSchema, version: str
) -> None:
    found = read_release(installed(tmp_path, flower_python, version))
    assert (found.version, found.schema.sha256) == (version, schema.sha256)
    assert version in found.protocol
    head = Upstream("localhost:1", found.version, ca=None, insecure=True).head(
        "/v1/fleet/x", 0, NodeHeaders("", "", "")
    )
    assert f"flwr-package-version: {version}\r\n".encode() in head


def test_a_release_with_any_other_message_is_refused_and_the_file_named(tmp_path: Path, flower_python: Path) -> None:
    node = "flwr/proto/node.proto"
    for change, words in (
        ({node: b"another"}, f"{node} ({hashlib.sha256(b'another').hexdigest()})"),
        ({node: None}, f"{node} (absent)"),
        ({"flwr/proto/more.proto": b""}, "flwr/proto/more.proto ("),
    ):
        with pytest.raises(ConfigurationError) as caught:
            read_release(installed(tmp_path, flower_python, "1.42.0", change=change))
        said = str(caught.value)
        assert words in said
        assert "docs/flower.md" in said
        assert sum(name in said for name in SCHEMAS) == (node in change)


def test_a_release_that_calls_by_grpc_or_has_no_name_is_refused(tmp_path: Path, flower_python: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"flwr 1\.38\.0 are known, but it sends them by gRPC.*1\.42\.0 there"):
        read_release(installed(tmp_path, flower_python, "1.38.0", http=False))
    with pytest.raises(ConfigurationError, match="not among the known ones"):
        read_release(installed(tmp_path, flower_python, "1.42.0\r\nx-more: patient 4711"))
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigurationError, match="no `flwr` that can be read"):
        read_release(tmp_path / "python")


def test_protocol_cannot_be_declared_for_what_an_app_computes(tmp_path: Path, hospital: Hospital) -> None:
    config = yaml.safe_load((tmp_path / "hospital1.yaml").read_text())
    config["flower"]["records"]["metrics"]["loss"] = "PROTOCOL"
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigurationError, match="what an app computes from patients' data"):
        FlowerConfig.read(tmp_path / "wrong.yaml")


def test_the_page_has_files_that_can_be_used_and_the_schemas_hash(tmp_path: Path, schema: ForeignSchema) -> None:
    page = (Path(__file__).parents[3] / "docs" / "flower.md").read_text(encoding="utf-8")
    config, consent = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "hospital1-flower.yaml").write_text(config)
    (tmp_path / "hospital1-flower.consent.yaml").write_text(consent)
    found = FlowerConfig.read(tmp_path / "hospital1-flower.yaml")
    assert not missing_for(ConsentFile.read(found.consent), plan_of(found, "flower-1", "", TRIED[-1]))
    assert schema.sha256 in page
