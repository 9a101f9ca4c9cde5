"""What a journal may say: the kinds of records, and what each holds.

A record is one JSON object on disk. ``read`` makes its type of it and ``content`` gives the object back; no other
module spells a record's kind or fields. A record costs nothing beside the parsed JSON: the object itself holds its
attributes, neither copied nor checked (``medsilo.privacy.verify`` checks what others wrote). A field that a
record lacks raises ``AttributeError`` where it is asked for; but one with a default here has that instead. Those stand
in some records of their kind only, or in none that an earlier release wrote, and are written where they are given.

``docs/bundle.schema.json`` is made from these types (``python docs/generate.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict, dataclass_transform

LARGEST_NUMBER = 2**53 - 1
"""Beyond it, JSON has no exact numbers."""
HASH = "^[0-9a-f]{64}$"


@dataclass(frozen=True)
class Form:
    """What the published schema says of a value besides its type. ``named``: it has a form of its own there.
    ``null``: a field that may be left out may be null as well."""

    named: str | None = None
    pattern: str | None = None
    minimum: int | None = None
    maximum: int | None = None
    least_items: int | None = None
    null: bool = False


Hash = Annotated[str, Form(named="hash")]
Note = Annotated[str, Form(named="note")]
ClassName = Annotated[str, Form(named="exposure_class")]
CallId = Annotated[str, Form(pattern="^[0-9a-f]{32}$")]
Date = Annotated[str, Form(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
Time = Annotated[str, Form(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z$")]
Whole = Annotated[int, Form(minimum=0, maximum=LARGEST_NUMBER)]
Positive = Annotated[int, Form(minimum=1, maximum=LARGEST_NUMBER)]
Attempt = Annotated[int, Form(minimum=1)]
Json = Mapping[str, Any]
"""An object inside a record; what it holds, the ``TypedDict`` beside it says."""
Envelope = Annotated[Json, Form(named="envelope")]
Attested = Annotated[Json, Form(named="attestation_envelope")]
SchemaFiles = Annotated[Sequence[str], Form(named="schema_files")]
Direction = Literal["sent", "received"]


WITNESS_PEER = "witness:"
"""How the name of a witness begins where a record names whom something was sent to."""


class Kind(StrEnum):
    """The kinds of records that this release knows."""

    MESSAGE = "message"
    REFUSAL = "refusal"
    RUN = "run"
    CONSENT = "consent"
    APPROVAL = "approval"
    WITHDRAWAL = "withdrawal"
    KEY = "key"
    KEY_ROTATION = "key-rotation"
    PEER_KEY = "peer-key"
    FOREIGN_PEER = "foreign-peer"
    SCHEMA = "schema"
    SEGMENT = "segment"
    LEDGER = "ledger"
    VOID = "void"
    ROSTER = "roster"
    COSIGNED = "cosigned"
    MIX = "mix"
    EGRESS = "egress"


class Event(TypedDict):
    """A mechanism's parameters: sampling_rate, noise_multiplier and steps; noise_multiplier and releases; epsilon and
    releases; or deviation and releases."""

    kind: Literal["sampled-gaussian", "gaussian", "discrete-laplace", "discrete-gaussian"]


class Charge(TypedDict):
    """A charge of the privacy ledger. Purposes of other federations' runs are null."""

    data_sha256: Hash
    unit: Literal["image", "patient"]
    split: str
    adjacency: Literal["zero-out", "add-remove", "replace-one"]
    index: Positive
    sha256: Hash
    federation: str | None
    run: str | None
    plan_sha256: str | None
    round: int | None
    phase: str | None
    event: Event


class Spent(TypedDict):
    """What charges have cost. An ε without bound is null."""

    epsilon: float | None
    delta: float
    accountant: str


Tensor = TypedDict("Tensor", {"class": ClassName, "name": str, "shape": Sequence[Whole], "dtype": str})
"""A tensor of a message's manifest."""

Common = TypedDict("Common", {"class": ClassName, "bytes": Whole, "sha256": Hash})
"""The digest of tensors of one class."""


class WitnessEgress(TypedDict):
    """What the kernel counted on connections to an address of witnesses, ``names``; see ``egress``."""

    address: str
    names: Sequence[str]
    connections: Whole
    sent: Whole
    retransmitted: Whole
    segments: Whole
    received: Whole


class Consented(TypedDict):
    """A consent's content, and its file's hash."""

    sha256: Hash
    coordinator: str | None
    methods: Sequence[str]
    exposures: Sequence[str]
    rounds: Whole
    total_rounds: NotRequired[Whole | None]
    expires: Date | None
    privacy: NotRequired[Json | None]
    secure_aggregation: NotRequired[Json | None]
    trusts: NotRequired[Json | None]
    witnesses: NotRequired[Json | None]


class MaskStatement(TypedDict):
    """A silo's signed statement of its mask key for a round, and its certificate's word for the key that signed it."""

    statement: Envelope
    voucher: Envelope


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record:
    """What every record has. A record may hold more than this schema names."""

    kind: ClassVar[str]
    index: Whole
    """Number of the record in the journal, from 0: the leaf's number in the tree."""
    time: Time
    """When it was written, UTC, by its owner's clock."""
    federation: str
    self: str
    """Identity of the party whose journal it is."""

    def __init__(self, /, **fields: Any) -> None:
        vars(self).update(fields)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a record is not changed, and {name} was to be set")


class MessageRecord(Record):
    """A message, before it was sent or when it had come."""

    kind = Kind.MESSAGE
    rpc: str
    call_id: CallId
    peer: str
    """Identity of the other party."""
    peer_certificate_sha256: str
    purpose: str
    run: str | None
    plan_sha256: Hash | None
    round: Whole | None
    """From 0; null outside rounds, or before the first message named it."""
    attempt: Attempt
    direction: Direction
    frame: Whole
    """Number of the message in its call and direction, from 0."""
    message_type: str
    schema_sha256: Hash
    sha256: Hash
    """Of the message's exact bytes."""
    length: Whole
    """Of the message, in bytes."""
    fields: Mapping[str, Positive]
    """Bytes of each field path; they add up to the length."""
    classes: Mapping[ClassName, Positive]
    """Bytes of each exposure class; they add up to the length."""
    ledger: Sequence[Annotated[Json, Charge]]
    """The charges that paid for an update, with its first message."""
    tensors: Sequence[Annotated[Json, Tensor]] = ()
    """What this message, or those that follow it in the call, carry."""
    content: Annotated[Json, Common] | None = None
    """Of tensors that all silos of a round are given alike: the digest of those of this class as far as the call has
    brought them, without nonces."""
    attestation: Attested | None = None
    head_sha256: Hash | None = None
    """To a foreign peer: of the request line and headers before the bytes."""
    head_length: Whole | None = None


class RefusalRecord(Record):
    """A message, or a run, that was refused."""

    kind = Kind.REFUSAL
    reason: str
    rpc: str | None = None
    call_id: Annotated[CallId | None, Form(null=True)] = None
    peer: str | None = None
    peer_certificate_sha256: str | None = None
    purpose: str | None = None
    run: Annotated[str | None, Form(null=True)] = None
    plan_sha256: Annotated[Hash | None, Form(null=True)] = None
    plan: Json | None = None
    round: Annotated[Whole | None, Form(null=True)] = None
    attempt: Attempt | None = None
    direction: Direction | None = None
    message_type: str | None = None
    schema_sha256: Hash | None = None
    sha256: Hash | None = None
    length: Whole | None = None
    attestation: Envelope | None = None


class RunRecord(Record):
    """A run was joined, or begun."""

    kind = Kind.RUN
    run: str
    plan_sha256: Hash
    plan: Json
    """The run's plan; its canonical form has the hash."""


class ConsentRecord(Record):
    """The silo's consent, as its file had it."""

    kind = Kind.CONSENT
    consent: Annotated[Json, Consented]
    purpose: str | None = None
    """``enrolment``: the consent was held against the coordinator alone, before there was a run."""
    data: str | None = None
    """Name of the data set; empty where the door knows none."""
    data_sha256: str | None = None
    """Fingerprint of the data set's version."""
    synthetic: bool = False
    """The images were generated by a program."""
    given: bool = False
    """A person gave the consent anew, after a withdrawal."""
    unusable: str | None = None
    """What is wrong with the file as it stands now."""


class ApprovalRecord(Record):
    """A person approved a run's plan."""

    kind = Kind.APPROVAL
    plan_sha256: Hash
    run: str | None = None
    approved_at: str | None = None


class WithdrawalRecord(Record):
    """The consent ended: only PROTOCOL and IDENTITY may leave from here on."""

    kind = Kind.WITHDRAWAL
    run: Annotated[str | None, Form(null=True)] = None
    plan_sha256: Annotated[Hash | None, Form(null=True)] = None
    silo: str | None = None
    """At a coordinator: whose consent."""
    rounds_acknowledged: Sequence[Whole] = ()
    """Rounds, from 0, whose updates the coordinator had acknowledged."""
    dropped_round: Annotated[Whole | None, Form(null=True)] = None
    """At a coordinator: the open round that goes on without the silo's update."""
    cause: str | None = None
    reason: str | None = None
    """The hospital's own, which stays with it."""
    statement: Envelope | None = None
    """The signed withdrawal."""


class KeyRecord(Record):
    """The journal's first record: its public audit key and its name."""

    kind = Kind.KEY
    public_key: Hash
    origin: str


class KeyRotationRecord(Record):
    """The audit key was changed; both keys have signed the statement."""

    kind = Kind.KEY_ROTATION
    public_key: Hash
    statement: Envelope


class PeerKeyRecord(Record):
    """The other party's public audit key became known."""

    kind = Kind.PEER_KEY
    peer: str
    public_key: Hash
    rotations: Sequence[Envelope]


class ForeignPeerRecord(Record):
    """The other party speaks another system's protocol and signs nothing; stands before anything is exchanged with
    it."""

    kind = Kind.FOREIGN_PEER
    peer: str
    protocol: str


class SchemaRecord(Record):
    """The wire schema that messages from here on were attributed with."""

    kind = Kind.SCHEMA
    schema_sha256: Hash
    files: SchemaFiles


class SegmentRecord(Record):
    """The first record of a new file: names the one before, its hash, and the checkpoint over all before."""

    kind = Kind.SEGMENT
    file: str
    first: Whole
    records: Whole
    sha256: Hash
    checkpoint: Note


class LedgerRecord(Record):
    """The privacy ledger was charged, before the training that it pays for."""

    kind = Kind.LEDGER
    charge: Annotated[Json, Charge]
    spent: Annotated[Json, Spent] | None = None
    """What all charges of the account have cost, up to this one."""
    unit_spent: Annotated[Json, Spent] | None = None
    """What those have cost that the most-spent image (patient) has in other accounts too."""
    failed: bool = False
    """The training that was paid for failed by what came out of it, so that the charge is never voided."""


class VoidRecord(Record):
    """A charge counts no more: no update was sent since the record that told of it when it was made."""

    kind = Kind.VOID
    charge: Annotated[Json, Charge]
    charged: Whole
    """The number of that record."""


class RosterRecord(Record):
    """Whose updates of a round are masked together; at a silo with the signed statements of their mask keys."""

    kind = Kind.ROSTER
    run: str
    plan_sha256: Hash
    round: Whole
    silos: Annotated[Sequence[str], Form(least_items=1)]
    roster_sha256: Hash
    received_sha256: Hash | None = None
    """Of the models that all of them were given to train from."""
    statements: Sequence[Annotated[Json, MaskStatement]] = ()


class CosignedRecord(Record):
    """A checkpoint of this journal was shown to its witnesses, and cosigned by those who answered."""

    kind = Kind.COSIGNED
    checkpoint: Note
    """It, signed, with the witnesses' lines under it."""
    witnesses: Sequence[str]
    """The keys (``name+hash+key``) of those who cosigned it."""
    away: Mapping[str, str]
    """Why the others did not, by their names."""


class MixRecord(Record):
    """Before a silo sent what opens mixtures of a round's models: the weights, by their digest, and what it found of
    them."""

    kind = Kind.MIX
    run: str
    plan_sha256: Hash
    round: Whole
    """In which the models were sealed."""
    roster_sha256: Hash
    mix_sha256: Hash
    """SHA-256 of weights and roster."""
    models: Whole | None
    """In a mixture that holds the silo's model, or its own, how many count beside its recipient's own, at least."""
    isolation: float
    """How far the silo's model stands out of what any recipient gets, at most."""
    isolation_over_rounds: float
    """The same of what recipients got in the last rounds together."""
    rounds: Whole
    """How many those are, the present one included."""


class EgressRecord(Record):
    """What the kernel counted for a silo without a network (``silo train --confined``), since its process began.

    Counts are of bytes within TCP, on all connections to the address; beside it only those of witnesses can be reached.
    """

    kind = Kind.EGRESS
    since: Whole
    """The record with which this confinement began, itself of this kind."""
    address: str
    connections: Whole
    sent: Whole
    """Each byte once: what went again is not in it."""
    retransmitted: Whole
    segments: Whole
    """Packets that left, each with headers of TCP and IP around it."""
    received: Whole
    interfaces: Mapping[str, Whole]
    """Bytes that left by each interface of the daemon's network namespace; loopback's stay in it."""
    refused: Whole
    """How often something in the namespace wanted another address, for which the kernel had no route."""
    witnesses: Sequence[Annotated[Json, WitnessEgress]] = ()
    """The counts of each address that leads to witnesses."""


class OtherRecord(Record):
    """Of a kind that this release does not know."""


TYPES: Mapping[str, type[Record]] = {
    kind: found for kind in Kind for found in Record.__subclasses__() if vars(found).get("kind") is kind
}
"""The type of each kind of record."""


def read(content: dict[str, Any]) -> Record:
    """The record of a JSON object, which becomes its own; raises ``KeyError`` or ``TypeError`` for one without a
    kind."""
    record = object.__new__(TYPES.get(content["kind"], OtherRecord))
    object.__setattr__(record, "__dict__", content)
    return record


def content(record: Record) -> dict[str, Any]:
    """A record as a JSON object, as far as it has been given what it holds."""
    return {**vars(record), "kind": record.kind}


def charges_of(record: Record) -> Sequence[Json]:
    """The privacy ledger's charges of which a record tells: its own, or what paid for a message."""
    match record:
        case MessageRecord():
            return record.ledger
        case LedgerRecord():
            return [record.charge]
    return ()


def run_of(record: Record) -> str | None:
    """The run of which a record speaks, whatever its kind is; None for none."""
    found: str | None = vars(record).get("run")
    return found


def round_of(record: Record) -> int | None:
    """The round, from 0, of which a record speaks, whatever its kind is; None for none."""
    found: int | None = vars(record).get("round")
    return found
