"""Everything that reads what someone else wrote, or what a disk may have damaged: with good examples of its input."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rfc8785
import torch
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from google.protobuf.message import DecodeError
from PIL import Image

from medsilo.algorithms.datasets import load_npz, save_npz
from medsilo.algorithms.tensors import Part
from medsilo.algorithms.tensors.files import read_payload, write_payload
from medsilo.algorithms.tensors.transfer import MemorySink, Receiver, manifest, read_manifest
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.privacy.audit.bundle import export
from medsilo.privacy.audit.fork_proof import ForkProof, View, read_fork_proof
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.budget.accounting import SampledGaussian
from medsilo.privacy.budget.ledger import Budget, Ledger, Purpose, Subject, ledgers
from medsilo.privacy.budget.units import Content
from medsilo.privacy.consent.consent import ConsentFile
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.consent.withdrawal import History, SignedWithdrawal
from medsilo.privacy.door.archive import SentArchive
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.door.receipts import ReceiptState
from medsilo.privacy.errors import MedsiloError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.canonical import read_canonical
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.certificates import load_credentials
from medsilo.privacy.identity.endpoint import TlsFiles
from medsilo.privacy.identity.envelope import ATTESTATION, from_json, from_message, seal, to_json, unseal
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys, load_audit_key, load_audit_public
from medsilo.privacy.identity.revocation import LIST, LiveCredentials, revoke
from medsilo.privacy.journal.checkpoint import Checkpoint, cosign, verify, verify_cosignature
from medsilo.privacy.journal.journal import CHECKPOINTS, RECORDS, Journal
from medsilo.privacy.journal.merkle import EMPTY_ROOT
from medsilo.privacy.journal.records import Record
from medsilo.privacy.journal.stored_schema import StoredSchema
from medsilo.privacy.secure_aggregation.mask_keys import Occasion, certify, read_certified, round_of, vouch
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1 import journal_pb2, tensor_pb2
from medsilo.protos.nonces import nonce
from medsilo.silo.data.image_files import read_image
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.silo.run.run_state import RunState
from medsilo.silo.state.config import SiloConfig
from medsilo.simulation.experiment import ExperimentConfig
from tests.support.evidence.exchanging import COORDINATOR, FEDERATION, PLAN, SILO, key_of, meet, two_rounds

CONFIGS = Path(__file__).parents[2] / "configs"


@dataclass(frozen=True)
class Parser:
    """``read`` takes input of any kind: it returns, or raises one of ``refusals``; anything else is a defect.

    ``examples``: good input. ``tokens``: pieces that its form is made of.
    """

    read: Callable[[bytes], object]
    examples: Sequence[bytes]
    tokens: Sequence[bytes] = ()
    refusals: tuple[type[Exception], ...] = (MedsiloError,)


Make = Callable[[Path], Parser]
PARSERS: dict[str, Make] = {}
JSON_TOKENS = tuple(b'{ } [ ] : , " "" null true NaN -0 1e400 1E5 0.1 \\u0000 \\ud800 [[[[[[[['.split())


def parser(make: Make) -> Make:
    PARSERS[make.__name__] = make
    return make


def parsed(kind: Any, data: bytes) -> Any:
    """The message in bytes; what is none is refused, as the door does it."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise RefusedError(str(error)) from None


def in_file(folder: Path, read: Callable[[Path], object], name: str = "input") -> Callable[[bytes], object]:
    """A reader of files as one of bytes."""
    path = folder / name

    def from_bytes(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return from_bytes


class _Discarding:
    """A journal that keeps nothing; what cannot be a record is refused as by a real one."""

    origin = "medsilo/test/coordinator/coordinator"

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "nowhere"
        self.public_key = bytes(32)
        self.memory = None

    def read(self, _first: int) -> Iterator[Record]:
        return iter(())

    def append(self, records: Sequence[Mapping[str, Any]], *, durable: bool = True) -> range:
        for record in records:
            rfc8785.dumps({"v": 1, "index": 0, "time": "", **record})
        return range(len(records))


_KINDS = (
    *(wire.GetPlanRequest, wire.GetPlanResponse, wire.JoinRequest, wire.JoinResponse, wire.AttestRequest),
    *(wire.AttestResponse, wire.GetTaskRequest, wire.GetTaskResponse, wire.SubmitUpdateRequest),
    *(wire.SubmitUpdateResponse, wire.WithdrawRequest, wire.WithdrawResponse),
)


def _sent(folder: Path) -> list[bytes]:
    """Messages of two rounds as they travel, each behind a byte that says of which kind it is."""
    exchange = meet(folder)
    found: list[bytes] = []
    for party in (exchange.silo, exchange.coordinator):

        def release(messages: Any, call: Call, real: Any = party.door.release) -> list[bytes]:
            data = real(messages, call)
            found.extend(bytes([_KINDS.index(type(m))]) + d for m, d in zip(messages, data, strict=True))
            return data  # type: ignore[no-any-return]

        party.door.release = release  # type: ignore[method-assign]
    exchange.get_plan()
    exchange.join()
    exchange.rounds([0, 1])
    exchange.attest()
    exchange.close()
    return found


@parser
def messages(folder: Path) -> Parser:
    """Every message of the wire, through the door: attributed, parsed, recorded, its signed word checked."""
    door = Door(_Discarding(folder), identity=COORDINATOR, federation=FEDERATION, gate=PlanGate(Exposure))  # type: ignore[arg-type]
    key = key_of(1).public_key().public_bytes_raw()

    def read(data: bytes) -> None:
        kind = _KINDS[data[0] % len(_KINDS)] if data else _KINDS[0]
        door._receipt_states.clear()
        door.receipt_state(SILO).peer_key = key
        message = door.admit(data[1:], kind, Call(kind.__name__, SILO, "", "fuzzing"))
        content: Any = (
            getattr(message, message.WhichOneof("frame") or "", message) if "frame" in _oneofs(kind) else message
        )
        for name in ("parts",):
            read_manifest(getattr(content, name, ()))
        for envelope in getattr(content, "rotations", ()):
            to_json(from_message(envelope))

    header = wire.SubmitUpdateRequest(update=wire.Update(nonce=nonce(), silo="a", parts=manifest(_payload())))
    return Parser(read, [*_sent(folder / "exchange"), bytes([8]) + header.SerializeToString()])


def _oneofs(kind: Any) -> Any:
    return kind.DESCRIPTOR.oneofs_by_name


def _payload() -> dict[Exposure, Part]:
    return {
        Exposure.PEER_DERIVED: Part.of({"w": torch.ones(2, 3), "b": torch.zeros(2, dtype=torch.float64)}),
        Exposure.SAMPLE_COUNT: Part.of({"samples": torch.tensor(7)}),
    }


@parser
def transfers(folder: Path) -> Parser:
    """A manifest and the chunks behind it."""

    def read(data: bytes) -> None:
        stream = parsed(wire.GetTaskResponse, data[2:])
        parts = read_manifest(stream.task.parts)
        if sum(spec.nbytes for specs in parts.values() for spec in specs) > 1 << 20:
            return  # announced sizes are another matter: MemorySink asks for them at once
        receiver = Receiver(parts, MemorySink(parts))
        size = 1 + int.from_bytes(data[:2], "big")
        body = stream.task.attestation.payload
        for start in range(0, len(body), size):
            chunk = tensor_pb2.TensorChunk(nonce=bytes(16))
            setattr(chunk, Exposure.PEER_DERIVED.chunk_field, body[start : start + size])
            receiver.take(chunk)
        receiver.finish()

    task = wire.Task(nonce=bytes(16), parts=manifest({Exposure.PEER_DERIVED: _payload()[Exposure.PEER_DERIVED]}))
    task.attestation.payload = b"".join(_payload()[Exposure.PEER_DERIVED].chunks(1 << 20))
    return Parser(read, [b"\xff\xff" + wire.GetTaskResponse(task=task).SerializeToString()])


@parser
def plans(folder: Path) -> Parser:
    """A run's plan, as a coordinator announces it."""
    from medsilo.algorithms.feddfq import FedDFQ
    from medsilo.algorithms.registry import make as make_method
    from medsilo.privacy.budget.promise import PrivacyPlan
    from medsilo.privacy.consent.plan import SecureAggregationPlan

    def read(data: bytes) -> None:
        message = parsed(wire.GetPlanResponse, data)
        plan = RunPlan.from_message(message.plan)
        assert RunPlan.from_message(plan.to_message()).sha256 == plan.sha256
        make_method(plan.method.name, plan.method.parameters)

    private = PrivacyPlan(epsilon=8, delta=1e-5, clipping_norm=1, noise_multiplier=2, sampling_rate=0.2, steps=500)
    dfq = {"name": "feddfq", "parameters": FedDFQ().parameters()}
    examples = [
        wire.GetPlanResponse(plan=plan.to_message()).SerializeToString()
        for plan in (
            PLAN,
            PLAN.model_copy(update={"privacy": private}),
            PLAN.model_copy(update={"secure_aggregation": SecureAggregationPlan(minimum=3, rounds=5)}),
            RunPlan.model_validate({**PLAN.model_dump(), "method": dfq}),
        )
    ]
    return Parser(read, examples, JSON_TOKENS)


@parser
def attestations(folder: Path) -> Parser:
    """What another party has signed about the messages exchanged; the signature always holds."""
    exchange = two_rounds(folder / "exchange")
    lines = (exchange.coordinator.folder / RECORDS).read_bytes().splitlines()
    documents = [
        from_json(record["attestation"]).payload
        for record in map(json.loads, lines)
        if record.get("attestation") and record["direction"] == "sent"
    ]
    key = key_of(200)

    def read(data: bytes) -> None:
        state = ReceiptState(SILO, COORDINATOR)
        state.peer_key = key.public_key().public_bytes_raw()
        state.check_signed(_sealed(data, ATTESTATION, key))

    return Parser(read, documents, JSON_TOKENS)


def _sealed(data: bytes, kind: str, key: Ed25519PrivateKey) -> Any:
    from securesystemslib import dsse

    from medsilo.privacy.identity.envelope import countersign

    envelope = dsse.Envelope(data, kind, {})
    countersign(envelope, key)
    return envelope


@parser
def signed_withdrawals(folder: Path) -> Parser:
    """A signed withdrawal; the signature always holds."""
    key = key_of(1)
    good = {
        "v": 1,
        "federation": FEDERATION,
        "silo": SILO,
        "coordinator": COORDINATOR,
        "run": "run1",
        "plan_sha256": "ab" * 32,
        "rounds_acknowledged": [0, 1],
        "reason": "withdrawn by the hospital",
        "at": "2026-01-31T12:00:00Z",
        "models_unlearned": False,
    }
    SignedWithdrawal.model_validate(good)

    def read(data: bytes) -> None:
        from medsilo.privacy.consent.withdrawal import WITHDRAWAL

        SignedWithdrawal.open(_sealed(data, WITHDRAWAL, key), key.public_key().public_bytes_raw())

    return Parser(read, [rfc8785.dumps(good)], JSON_TOKENS)


@parser
def envelopes(folder: Path) -> Parser:
    """Signed documents in their JSON form, as journals and bundles hold them."""
    key = key_of(1)
    good = to_json(seal({"a": 1, "b": [True, None]}, ATTESTATION, key))

    def read(data: bytes) -> None:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RefusedError(str(error)) from None  # the reader of the record or bundle around it says so
        unseal(from_json(content), ATTESTATION, key.public_key().public_bytes_raw())

    return Parser(read, [rfc8785.dumps(good)], JSON_TOKENS)


@parser
def canonical_json(folder: Path) -> Parser:
    """Canonical JSON: either refused, or exactly the bytes that it is written as again."""
    examples: list[Any] = [{"a": 1, "b": [True, None]}, {"é": "\U0001f4a9", "x": 1e21}, [0.1, -5, "\n"], {}]

    def read(data: bytes) -> None:
        assert rfc8785.dumps(read_canonical(data)) == data

    return Parser(read, [rfc8785.dumps(item) for item in examples], JSON_TOKENS, (ValueError,))


@parser
def checkpoints(folder: Path) -> Parser:
    """Signed notes and cosignatures."""
    key = key_of(1)
    public = key.public_key().public_bytes_raw()
    note = Checkpoint("medsilo/test/silo/hospital1", 7, bytes(32)).sign(key)
    line = cosign(note, "medsilo/test/silo/hospital1", key, 1_700_000_000)

    def read(data: bytes) -> None:
        text = data.decode("utf-8", "surrogatepass" if len(data) % 2 else "replace")
        try:
            verify_cosignature(text, note, "medsilo/test/silo/hospital1", public)
        except MedsiloError:
            assert verify(text, public).sign(key).split("\n\n")[1] in text  # others may have signed it too

    return Parser(
        read,
        [note.encode(), line.encode()],
        (b"\n", "—".encode(), b"\n\n", b"=", b"-0", b"+7", b"007"),
        (MedsiloError, UnicodeDecodeError),
    )


@parser
def fork_proofs(folder: Path) -> Parser:
    """Proofs that a party signed two histories."""
    key = key_of(1)
    views = [
        View(
            shown_to=SILO,
            checkpoint=Checkpoint("medsilo/test/coordinator/coordinator", 7, bytes([side]) * 32).sign(key),
            size=0,
            root=EMPTY_ROOT.hex(),
            proof=(),
        )
        for side in (0, 1)
    ]
    public = key.public_key().public_bytes_raw().hex()
    good = ForkProof(party=COORDINATOR, public_key=public, views=(views[0], views[1]))
    good.write(folder / "good.json")

    def read(path: Path) -> None:
        if (found := read_fork_proof(path)) is not None:
            found.check()

    return Parser(in_file(folder, read), [(folder / "good.json").read_bytes()], (b'"proof":["00"]', b'"size":3'))


@parser
def mask_keys(folder: Path) -> Parser:
    """A silo's certified mask key."""
    create_authority(folder / "ca", "test")
    identity = Identity("test", "silo", "hospital1")
    keys = create_keys(folder / "keys", identity)
    issue(folder / "ca", "hospital1", keys.request, folder / "keys" / "tls.pem")
    ca = folder / "ca" / "ca.pem"
    credentials = load_credentials(ca=ca, certificate=folder / "keys" / "tls.pem", key=keys.tls_key, expected=identity)
    audit_key = load_audit_key(keys.audit_key)
    occasion = Occasion("test", "run1", bytes(32), 3)
    voucher = vouch(credentials, audit_key)
    good = certify(
        X25519PrivateKey.generate(), occasion, bytes(32), identity=identity, audit_key=audit_key, voucher=voucher
    ).to_message()
    ca_pem = ca.read_bytes()

    def read(data: bytes) -> None:
        message = parsed(journal_pb2.MaskKey, data)
        with contextlib.suppress(RefusedError):
            round_of(message)
        read_certified(message, occasion, ca_pem=ca_pem)

    return Parser(read, [good.SerializeToString()], JSON_TOKENS)


@parser
def stored_schemas(folder: Path) -> Parser:
    """The schema that a journal holds."""
    import base64

    from medsilo.privacy.exposure import SCHEMA_FILES

    whole = [base64.b64encode(file.serialized_pb).decode() for file in SCHEMA_FILES]

    def read(data: bytes) -> None:
        files = [base64.b64encode(part).decode() for part in data.split(b"|medsilo|")]
        StoredSchema(files).classes("medsilo.v1.GetTaskRequest", {"nonce": 18, "silo": 2, "attestation.payload": 5})

    return Parser(
        read, [b"|medsilo|".join(base64.b64decode(text) for text in whole)], (b"|medsilo|", b"nonce", b"\x0a")
    )


@parser
def safetensors(folder: Path) -> Parser:
    """A payload in a file, headers and bytes."""
    path = folder / "good.safetensors"
    write_payload(path, _payload())

    def read(data_path: Path) -> None:
        for part in read_payload(data_path).values():
            part.tensors()

    return Parser(in_file(folder, read), [path.read_bytes()], (*JSON_TOKENS, b"F32", b"I64", b'"shape":[', b"BF16"))


@parser
def run_states(folder: Path) -> Parser:
    """What a silo keeps of a run: progress.json and the files that it names."""
    dataset = generate_tissue(seed=3, train=18, test=9, size=16)
    state = folder / "run"
    from medsilo.algorithms.method import PERSONAL

    whole = RunState(state, PLAN, "hospital1", dataset)
    whole.save({PERSONAL: {"w": torch.ones(2)}}, trained_rounds=1, measurements={})
    progress = (state / "progress.json").read_bytes()
    tensors = next(state.glob("personal*.safetensors"))
    body = tensors.read_bytes()

    def read(data: bytes) -> None:
        first, _, second = data.partition(b"|medsilo|")
        (state / "progress.json").write_bytes(first)
        tensors.write_bytes(second)
        RunState(state, PLAN, "hospital1", dataset).memory()

    examples = [json.dumps(json.loads(progress)).encode() + b"|medsilo|" + body]
    return Parser(read, examples, (*JSON_TOKENS, b"../../", b"/", b"personal"))


@parser
def npz(folder: Path) -> Parser:
    """A shard in MedMNIST's form."""
    stored, packed = folder / "stored.npz", folder / "packed.npz"
    save_npz(stored, generate_tissue(seed=3, train=9, test=9, size=8))
    with np.load(stored) as arrays:
        small = {name: array for name, array in arrays.items() if name not in ("class_names", "source")}
    np.savez_compressed(packed, **small)
    tokens = (
        b"PK\x03\x04",
        b"PK\x01\x02",
        b"PK\x05\x06",
        b"\x93NUMPY\x01\x00",
        b"'descr': '|O'",
        b"(9999999999,)",
        b"<U9",
    )
    return Parser(in_file(folder, load_npz, "input.npz"), [stored.read_bytes(), packed.read_bytes()], tokens)


@parser
def pictures(folder: Path) -> Parser:
    """A picture for ``silo predict``."""
    image = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    examples = []
    for form in ("PNG", "JPEG", "TIFF", "BMP"):
        target = io.BytesIO()
        image.save(target, format=form)
        examples.append(target.getvalue())
    return Parser(
        in_file(folder, lambda path: read_image(path, channels=3, height=8, width=8), "input.png"),
        examples,
        (b"IHDR", b"IDAT", b"II*\x00"),
    )


YAML_TOKENS = (
    *(
        b": ",
        b"- ",
        b"? ",
        b"&a ",
        b"*a ",
        b"<<: *a",
        b"{",
        b"}",
        b"[",
        b"]",
        b"\n  ",
        b"\n- ",
        b"\t",
        b"'",
        b'"',
        b"#",
    ),
    *(b"!!binary ", b"!!python/object:os.system ", b"!!set ", b"!!timestamp ", b"%YAML 1.2\n", b"---\n", b"...\n"),
    *(b"1:30:00", b"0x1F", b"0o7", b".inf", b".nan", b"~", b"=", b"2026-02-30", b"\xef\xbb\xbf", b"\xff\xfe"),
)


def _uncommented(path: Path) -> bytes:
    """A configuration without its comments, in which most damage would change nothing."""
    return re.sub(rb"(^|\s)\s*#.*", b"", path.read_bytes())


@parser
def silo_yaml(folder: Path) -> Parser:
    """A hospital's configuration."""
    return Parser(in_file(folder, SiloConfig.read), [_uncommented(CONFIGS / "hospital1.yaml")], YAML_TOKENS)


@parser
def consent_yaml(folder: Path) -> Parser:
    """A hospital's consent."""
    full = {
        "coordinator": COORDINATOR,
        "methods": ["fedavg"],
        "exposures": ["PROTOCOL", "MODEL_PARAMETERS"],
        "rounds": 5,
        "expires": "2027-01-31",
        "privacy": {"epsilon": 8, "delta": 1e-5},
        "secure_aggregation": {"minimum": 3, "audit_keys": {"hospital2": "ab" * 32}},
    }
    examples = [_uncommented(CONFIGS / "hospital1.consent.yaml"), yaml.safe_dump(full).encode()]
    return Parser(in_file(folder, ConsentFile.read), examples, YAML_TOKENS)


@parser
def coordinator_yaml(folder: Path) -> Parser:
    """A coordinator's configuration."""
    return Parser(in_file(folder, CoordinatorConfig.read), [_uncommented(CONFIGS / "coordinator.yaml")], YAML_TOKENS)


@parser
def experiment_yaml(folder: Path) -> Parser:
    """An experiment's file."""
    examples = [_uncommented(path) for path in sorted((CONFIGS / "experiments").glob("*.yaml"))]
    return Parser(in_file(folder, ExperimentConfig.read), examples, YAML_TOKENS)


def _party(folder: Path) -> tuple[Path, Path, Identity]:
    create_authority(folder / "ca", "test")
    identity = Identity("test", "silo", "hospital1")
    create_keys(folder / "keys", identity)
    issue(folder / "ca", "hospital1", folder / "keys" / "tls.csr", folder / "keys" / "tls.pem")
    return folder / "ca", folder / "keys", identity


_PEM_TOKENS = (b"-----BEGIN CERTIFICATE-----\n", b"-----END CERTIFICATE-----\n", b"-----BEGIN EC PRIVATE KEY-----\n")


def _der(pem: bytes) -> tuple[bytes, bytes]:
    """The label and the DER bytes of a PEM file."""
    import base64

    lines = pem.splitlines()
    return lines[0], base64.b64decode(b"".join(lines[1:-1]))


def _pem(data: bytes, label: bytes) -> bytes:
    """One time in two the input is DER, wrapped so that the damage reaches the ASN.1 behind the PEM."""
    import base64

    if data.startswith(b"-"):
        return data
    return label + b"\n" + base64.encodebytes(data) + label.replace(b"BEGIN", b"END") + b"\n"


def _pem_parser(good: bytes, read: Callable[[bytes], object]) -> Parser:
    label, der = _der(good)
    return Parser(lambda data: read(_pem(data, label)), [good, der, der], _PEM_TOKENS)


@parser
def certificates(folder: Path) -> Parser:
    """A party's certificate."""
    ca, keys, identity = _party(folder)

    def read(path: Path) -> None:
        load_credentials(ca=ca / "ca.pem", certificate=path, key=keys / "tls.key", expected=identity)

    return _pem_parser((keys / "tls.pem").read_bytes(), in_file(folder, read))


@parser
def authorities(folder: Path) -> Parser:
    """The CA's certificate, as a party was given it."""
    ca, keys, identity = _party(folder)

    def read(path: Path) -> None:
        load_credentials(ca=path, certificate=keys / "tls.pem", key=keys / "tls.key", expected=identity)

    return _pem_parser((ca / "ca.pem").read_bytes(), in_file(folder, read))


@parser
def revocation_lists(folder: Path) -> Parser:
    """The CA's revocation list, as the coordinator was given it."""
    ca, keys, identity = _party(folder)
    revoke(ca, "hospital1")
    path = folder / "input.crl"
    files = TlsFiles(ca=ca / "ca.pem", certificate=keys / "tls.pem", key=keys / "tls.key", revoked=path)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        LiveCredentials(files, identity)

    return _pem_parser((ca / LIST).read_bytes(), read)


@parser
def requests(folder: Path) -> Parser:
    """A certificate request, as the CA's operator gets it."""
    ca, keys, _ = _party(folder)

    def read(path: Path) -> None:
        issue(ca, "hospital1", path, folder / "out.pem")
        (ca / "issued.jsonl").unlink()

    return _pem_parser((keys / "tls.csr").read_bytes(), in_file(folder, read))


@parser
def private_keys(folder: Path) -> Parser:
    """A TLS key or audit key."""
    _, keys, _ = _party(folder)
    path = folder / "input.key"
    path.touch(mode=0o600)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        load_audit_key(path)

    return _pem_parser((keys / "audit.key").read_bytes(), read)


@parser
def public_keys(folder: Path) -> Parser:
    """A public audit key, for ``audit verify --key``."""
    _, keys, _ = _party(folder)
    return _pem_parser((keys / "audit.pub").read_bytes(), in_file(folder, load_audit_public))


_BREAK = b"|medsilo|"


@parser
def journals(folder: Path) -> Parser:
    """A journal's folder, opened by its daemon, and its history read."""
    exchange = two_rounds(folder / "exchange")
    whole = b"".join(
        [(exchange.silo.folder / RECORDS).read_bytes(), _BREAK, (exchange.silo.folder / CHECKPOINTS).read_bytes()]
    )
    lines = whole.partition(_BREAK)[0].splitlines(keepends=True)
    target = folder / "input"

    def read(data: bytes) -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        first, _, second = data.partition(_BREAK)
        (target / RECORDS).write_bytes(first)
        (target / CHECKPOINTS).write_bytes(second)
        History.read(target)
        with Journal(target, key=exchange.silo.key, origin=exchange.silo.journal.origin) as journal:
            Door(journal, identity=SILO, federation=FEDERATION, gate=PlanGate(Exposure))

    # With no checkpoint to contradict them, all sorts of records reach the readers behind.
    short = b"".join(lines[:1] + lines[2:])
    return Parser(read, [whole, b"".join(lines), short], JSON_TOKENS)


@parser
def bundles(folder: Path) -> Parser:
    """An evidence bundle, verified."""
    exchange = two_rounds(folder / "exchange")
    path = folder / "good.json"
    export(exchange.silo.folder, path)
    return Parser(in_file(folder, lambda p: verify_evidence(p), "input.json"), [path.read_bytes()], JSON_TOKENS)


@parser
def ledger_files(folder: Path) -> Parser:
    """A privacy ledger."""
    subject = Subject("ab" * 32, "image")
    ledger = Ledger(folder / "ledger", subject)
    for number in range(3):
        purpose = Purpose(federation="test", run="r", plan_sha256="ab" * 32, round=number, phase="training")
        ledger.charge(SampledGaussian(0.1, 2.0, 10), purpose, Budget(100.0, 1e-5))

    def read(data: bytes) -> None:
        ledger.path.write_bytes(data)
        for found in ledgers(folder / "ledger"):
            for entry in found.entries():
                entry.describe()

    return Parser(read, [ledger.path.read_bytes()], JSON_TOKENS)


@parser
def unit_files(folder: Path) -> Parser:
    """The hashes of images and patients beside a privacy ledger."""
    images = np.arange(3, dtype=np.uint8)[:, None, None, None] + np.zeros((3, 2, 2, 1), np.uint8)
    contents = {"train": Content(images, np.array(["a", "b", "b"]))}
    purpose = Purpose(federation="test", run="r", plan_sha256="ab" * 32, round=0, phase="training")
    for version in ("ab", "cd"):
        ledger = Ledger(folder / "ledger", Subject(version * 32, "image"), contents)
        ledger.charge(SampledGaussian(0.1, 2.0, 10), purpose, Budget(100.0, 1e-5))
    path = folder / "ledger" / f"{ledger.subject.data_sha256}-train.units"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        Ledger(folder / "ledger", Subject("ab" * 32, "image"), contents).guarantee(1e-5)

    return Parser(read, [path.read_bytes()], JSON_TOKENS)


@parser
def kept_messages(folder: Path) -> Parser:
    """What a silo has kept of what it sent."""
    archive = SentArchive(folder / "sent", folder / "sent.key")
    for frame in range(3):
        archive.keep("ab" * 16, frame, b"message" * frame)
    (path,) = (folder / "sent").glob("*.sealed")

    def read(data: bytes) -> None:
        path.write_bytes(data)
        list(archive.read("ab" * 16))

    return Parser(read, [path.read_bytes()])


@parser
def small_files(folder: Path) -> Parser:
    """The little JSON files of a state folder: an approval, a withdrawal, a model's description."""
    from medsilo.silo.model.prediction import _description
    from medsilo.silo.run.approval import _approved_at
    from medsilo.silo.state.withdrawal_request import WithdrawalRequest

    class Config:
        approval = folder / "model.json"

    def read(path: Path) -> None:
        _approved_at(Config, "ab" * 32)  # type: ignore[arg-type]
        WithdrawalRequest.read(path)
        _description(folder)

    model = {"architecture": {"name": "m", "input_shape": [1, 8, 8], "classes": 2}, "class_names": ["a", "b"]}
    examples: list[Any] = [
        model,
        {"run": "r", "plan_sha256": "ab" * 32, "at": "2026-01-31T12:00:00Z"},
        {"at": "2026-01-31T12:00:00Z", "reason": "none"},
    ]
    return Parser(in_file(folder, read, "model.json"), [json.dumps(item).encode() for item in examples], JSON_TOKENS)


def generator(seed: int, name: str, index: int) -> random.Random:
    """The source of one input's changes."""
    return random.Random(f"{seed}/{name}/{index}")
