"""Between a SuperNode and Flower's server: each request is read, held against consent, recorded, and made anew.

A reply is announced first and then comes object by object. It is held here until it is whole, since only then is known
what its bytes are; nothing of it, not even its objects' hashes, leaves before. What may not leave is replaced by an
error reply that says no more than that, so that the server need not wait for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from medsilo.privacy.consent.consent import ConsentFile, Missing
from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.consent.gate import ConsentGate
from medsilo.privacy.consent.plan import MethodPlan
from medsilo.privacy.consent.withdrawal import EndedError
from medsilo.privacy.door.foreign_door import ForeignDoor, ForeignSchema
from medsilo.privacy.errors import ConsentError, MedsiloError, RefusedError, UnreachableError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.journal.records import RunRecord
from medsilo.silo.flower.config import FlowerConfig
from medsilo.silo.flower.objects import Reply, ReplyReader, is_object_id, message_object, object_id, tree_ids
from medsilo.silo.flower.release import PACKAGE, RPCS, Rpc
from medsilo.silo.flower.upstream import NodeHeaders, Upstream, check_public_key

METHOD = "flower"
"""What stands under ``methods:`` in a consent to Flower apps."""
WITHHELD = "withheld by the hospital's door"
_REFUSED_CODE = 6
"""Flower's code for a reply that was stopped on its way by what stands around the app."""
_MOST_CODES = 100
_MOST_ASKED = 1000
"""Messages that a reply may still be for."""
_MOST_UPLOADS = 4
"""Replies under way; a SuperNode has one at a time, and may leave one unfinished."""
_PUSH_MESSAGES, _PUSH_OBJECT = RPCS["/v1/fleet/push-messages"], RPCS["/v1/fleet/push-object"]
_REPEATED = {
    "run_id": "run_id",
    "group_id": "group_id",
    "message_type": "message_type",
    "src_node_id": "dst_node_id",
    "dst_node_id": "src_node_id",
    "src_task_id": "dst_task_id",
    "dst_task_id": "src_task_id",
}
"""What a reply's metadata repeats of the message's that it is for."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FlowerPlan:
    """What stands for a plan where Flower's server leads the run.

    ``app_sha256``: of the app as the server gave it. ``release``: the version of Flower.
    """

    run: str
    coordinator_identity: Identity
    records: Mapping[str, Mapping[str, Exposure]]
    required: tuple[Exposure, ...]
    app_sha256: str
    release: str
    optional: tuple[Exposure, ...] = ()
    rounds: None = None
    training: None = None
    privacy: None = None
    secure_aggregation: None = None
    trust: None = None

    @property
    def method(self) -> MethodPlan:
        """The method, as consents name it."""
        return MethodPlan(name=METHOD, parameters={"release": self.release, "app_sha256": self.app_sha256})

    def describe(self) -> dict[str, Any]:
        """As it stands in the journal."""
        return {
            "federation": self.coordinator_identity.federation,
            "coordinator": self.coordinator_identity.name,
            "run": self.run,
            "method": self.method.model_dump(mode="json"),
            "rounds": None,
            "required": list(self.required),
            "optional": [],
            "downlink": [Exposure.PEER_DERIVED.value],
            "records": {name: dict(record) for name, record in self.records.items()},
        }


@dataclass
class _Part:
    """A run that this hospital takes part in."""

    plan_sha256: str
    gate: ConsentGate


@dataclass
class _Prepared:
    """A reply as it leaves. ``run``: of which it counts as a round, with its number; None for an error."""

    announcement: Any
    contents: dict[str, bytes]
    reply: Reply
    of_run: dict[str, Any]
    gate: ConsentGate
    pushed: set[str] = field(default_factory=set)


@dataclass
class _Upload:
    """A reply on its way here. ``refused``: why it did not leave. ``over``: it was dealt with."""

    announcement: Any
    wanted: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)
    prepared: _Prepared | None = None
    refused: str = ""
    over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Relay:
    """Answers a SuperNode's requests. ``ending``: why nothing may leave any more, once that is so."""

    def __init__(self, config: FlowerConfig, door: ForeignDoor, gate: ConsentGate, upstream: Upstream) -> None:
        self._config = config
        self._door = door
        self._schema: ForeignSchema = door.schema
        self._gate = gate
        self._upstream = upstream
        self._parts: dict[str, _Part] = {}
        self._apps: dict[str, str] = {
            run: str(plan["method"]["parameters"]["app_sha256"]) for run, plan in door.plans.items()
        }
        self._asked: OrderedDict[str, Any] = OrderedDict()
        self._uploads: OrderedDict[str, _Upload] = OrderedDict()
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self.ending: MedsiloError | None = None
        self.ended = threading.Event()

    def answer(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """Status and content for the SuperNode."""
        try:
            if self.ending is not None:
                raise self.ending
            rpc = RPCS.get(path)
            if rpc is None:
                raise self._refuse(path[:100], "unknown", body, f"{path[:100]!r} is no call that the door knows")
            try:
                node = NodeHeaders.read(headers, self._upstream.version)
                request, _ = self._schema.read(body, rpc.request)
                _check_form(request)
            except RefusedError as error:
                raise self._refuse(rpc.name, rpc.request, body, str(error)) from None
            if rpc is _PUSH_MESSAGES:
                return 200, self._announce(request, body)
            if rpc is _PUSH_OBJECT:
                return 200, self._take_object(request, node, body)
            return self._pass_on(rpc, request, node)
        except RefusedError as error:
            log.warning("refused: %s", error)
            return 422, str(error).encode()
        except _Answered as error:
            return error.status, error.content
        except UnreachableError as error:
            log.warning("%s", error)
            return 503, str(error).encode()
        except ConsentError as error:
            if isinstance(error, EndedError) and error.cause != Cause.ROUNDS:
                self._end(error)
            log.warning("%s", error)
            return 422, str(error).encode()
        except MedsiloError as error:  # the journal, or its disk: nothing leaves that cannot be recorded
            self._end(error)
            return 500, str(error).encode()

    def _end(self, error: MedsiloError) -> None:
        self.ending = self.ending or error
        self.ended.set()

    def _pass_on(self, rpc: Rpc, request: Any, node: NodeHeaders) -> tuple[int, bytes]:
        run = _run_of(request)
        part = self._parts.get(run or "")
        content, answer = self._exchange(
            rpc, request, node, self._gate, {"run": run, "plan_sha256": part.plan_sha256 if part else None}
        )
        if rpc.name == "GetFab" and run is not None:
            self._apps[run] = hashlib.sha256(answer.fab.content).hexdigest()
        with self._lock:
            for message in getattr(answer, "messages_list", ()):
                _remember(self._asked, message.metadata.message_id, message.metadata, _MOST_ASKED)
        return 200, content

    def _exchange(
        self,
        rpc: Rpc,
        request: Any,
        node: NodeHeaders,
        gate: ConsentGate,
        of_run: Mapping[str, Any],
        **told: Any,
    ) -> tuple[bytes, Any]:
        """Records and sends a request; records its answer and returns it, as it came and as it is read.

        Raises ``_Answered`` for an answer that is an error of the server's.
        """
        connection = self._upstream.connect()
        try:
            call = self._door.call(rpc.name, connection.certificate_sha256, rpc.purpose, **of_run)
            wire = self._door.release(
                request, call, gate, head=lambda length: self._upstream.head(rpc.path, length, node), **told
            )
            status, content = connection.exchange(wire)
        finally:
            connection.close()
        if status != 200:
            self._door.refuse(content, rpc.response, call, "sent", f"the server answered {status} to {rpc.name}")
            raise _Answered(status, content)
        return content, self._door.admit(content, rpc.response, call)

    def _announce(self, request: Any, body: bytes) -> bytes:
        """Takes a reply's announcement; it is answered here, and goes on when the reply is whole."""
        try:
            if (len(request.messages_list), len(request.message_object_trees)) != (1, 1):
                raise RefusedError("it announces several replies at once, or none")
            message, tree = request.messages_list[0], request.message_object_trees[0]
            self._check_reply_to(message.metadata)
            if message.content.items:
                raise RefusedError("it holds records itself; they come as objects")
            wanted = tree_ids(tree)
            if not all(map(is_object_id, wanted)):
                raise RefusedError("it announces objects by what is no hash")
        except RefusedError as error:
            raise self._refuse(_PUSH_MESSAGES.name, _PUSH_MESSAGES.request, body, str(error)) from None
        session = secrets.token_hex(16)
        with self._lock:
            _remember(self._uploads, session, _Upload(request, wanted), _MOST_UPLOADS)
        answer = self._schema.make(_PUSH_MESSAGES.response)
        answer.objects_to_push.extend(wanted)
        answer.session_id = session
        return bytes(answer.SerializeToString())

    def _check_reply_to(self, metadata: Any) -> None:
        """A reply repeats what it was asked with: nothing else may stand in its metadata but when it was made."""
        asked = self._asked.get(metadata.reply_to_message_id)
        if asked is None:
            raise RefusedError("it is a reply to no message that has come through this door since it was opened")
        expected = self._schema.make(f"{PACKAGE}.Metadata")
        expected.CopyFrom(metadata)
        for mine, theirs in _REPEATED.items():
            expected.ClearField(mine)
            if not asked.DESCRIPTOR.fields_by_name[theirs].has_presence or asked.HasField(theirs):
                setattr(expected, mine, getattr(asked, theirs))
        if expected != metadata:
            raise RefusedError("its metadata does not repeat that of the message that it is a reply to")

    def _take_object(self, request: Any, node: NodeHeaders, body: bytes) -> bytes:
        upload = self._uploads.get(request.session_id)
        content = request.object_content
        problem = ""
        if upload is None:
            problem = "it belongs to no reply that was announced"
        elif request.object_id not in upload.wanted or object_id(content) != request.object_id:
            problem = "it is no object of the reply that was announced"
        elif request.run_id != upload.announcement.messages_list[0].metadata.run_id:
            problem = "it is of another run than the reply that was announced"
        if upload is None or problem:
            raise self._refuse(_PUSH_OBJECT.name, _PUSH_OBJECT.request, body, problem)
        with upload.lock:
            if not upload.over:
                upload.contents[request.object_id] = content
                if len(upload.contents) == len(upload.wanted):
                    self._finish(upload, node)
            if upload.refused:
                raise RefusedError(upload.refused)
        answer = self._schema.make(_PUSH_OBJECT.response)
        answer.stored = True
        return bytes(answer.SerializeToString())

    def _finish(self, upload: _Upload, node: NodeHeaders) -> None:
        """Sends a whole reply on, or an error in its place. Called again if the server could not be reached."""
        if upload.prepared is None:
            try:
                upload.prepared = self._prepare(upload)
            except (RefusedError, ConsentError) as error:
                if isinstance(error, EndedError) and error.cause != Cause.ROUNDS:
                    raise
                upload.refused = str(error)
                message = upload.announcement.messages_list[0]
                data = upload.announcement.SerializeToString(deterministic=True)
                call = self._door.call(
                    _PUSH_MESSAGES.name, "", _PUSH_MESSAGES.purpose, run=_run_name(message.metadata.run_id)
                )
                self._door.refuse(data, _PUSH_MESSAGES.request, call, "sent", upload.refused)
                upload.prepared = self._error(upload, _REFUSED_CODE)
        self._forward(upload.prepared, node)
        upload.over = True
        upload.contents.clear()
        upload.prepared = None

    def _prepare(self, upload: _Upload) -> _Prepared:
        """The reply as it may leave; raises ``RefusedError`` or ``ConsentError`` if it may not."""
        message, tree = upload.announcement.messages_list[0], upload.announcement.message_object_trees[0]
        reply = ReplyReader(self._schema, self._config.flower.records, upload.contents, tree, message.metadata).read()
        if reply.error != message.HasField("error"):
            raise RefusedError("it announces an error and is none, or the reverse")
        if reply.error:
            # What an app says of its error may hold anything: a file's name, a value.
            return self._error(upload, message.error.code)
        run = _run_name(message.metadata.run_id)
        with self._counting:
            part = self._join(run)
            number = max(self._door.rounds.get(run, set()), default=-1) + 1
            part.gate.check(reply.classes)
            part.gate.begin_round(number)
            self._door.rounds.setdefault(run, set()).add(number)
        announcement = self._schema.make(_PUSH_MESSAGES.request)
        announcement.CopyFrom(upload.announcement)
        _hide_runtime(announcement)
        of_run = {"run": run, "plan_sha256": part.plan_sha256, "round": number}
        return _Prepared(announcement, {name: upload.contents[name] for name in reply.parts}, reply, of_run, part.gate)

    def _error(self, upload: _Upload, code: int) -> _Prepared:
        """A reply that tells of an error by its number alone."""
        announcement = self._schema.make(_PUSH_MESSAGES.request)
        announcement.CopyFrom(upload.announcement)
        _hide_runtime(announcement)
        (message,) = announcement.messages_list
        message.ClearField("content")
        message.error.code = code if 0 <= code < _MOST_CODES else 0
        message.error.reason = WITHHELD
        content = message_object(self._schema, message.metadata, message.error)
        name = object_id(content)
        message.metadata.message_id = name
        (tree,) = announcement.message_object_trees
        tree.Clear()
        tree.object_id = name
        reply = ReplyReader(self._schema, {}, {name: content}, tree, message.metadata).read()
        run = _run_name(message.metadata.run_id)
        part = self._parts.get(run)
        of_run = {"run": run, "plan_sha256": part.plan_sha256 if part else None}
        return _Prepared(announcement, {name: content}, reply, of_run, self._gate)

    def _forward(self, prepared: _Prepared, node: NodeHeaders) -> None:
        announcement = prepared.announcement
        _, answer = self._exchange(
            _PUSH_MESSAGES, announcement, node, prepared.gate, prepared.of_run, tensors=prepared.reply.tensors
        )
        wanted = set(answer.objects_to_push)
        for name, data in prepared.contents.items():
            if name not in wanted or name in prepared.pushed:
                continue
            request = self._schema.make(_PUSH_OBJECT.request)
            request.node.CopyFrom(announcement.node)
            request.run_id = announcement.messages_list[0].metadata.run_id
            request.object_id, request.object_content, request.session_id = name, data, answer.session_id
            _, kept = self._exchange(
                _PUSH_OBJECT,
                request,
                node,
                prepared.gate,
                prepared.of_run,
                parts=("object_content", prepared.reply.parts[name]),
            )
            if not kept.stored:
                raise RefusedError("the server did not keep a part of the reply")
            prepared.pushed.add(name)

    def _join(self, run: str) -> _Part:
        """The hospital's part in a run, on record before anything of it leaves."""
        if (part := self._parts.get(run)) is not None:
            return part
        plan = plan_of(self._config, run, self._apps.get(run, ""), self._upstream.version)
        if missing := missing_for(self._gate.file, plan):
            raise self._gate.file.refusal(missing, f"run {run}")
        earlier = sum(len(rounds) for name, rounds in self._door.rounds.items() if name != run)
        gate = self._gate.joining(plan, rounds=self._door.rounds.get(run, ()), earlier_rounds=earlier)
        content = plan.describe()
        digest = hashlib.sha256(write_canonical(content)).hexdigest()
        with gate.held():  # the file may have been changed since it was held against the plan
            gate.check(())
            self._door.note(RunRecord(run=run, plan_sha256=digest, plan=content))
        part = self._parts[run] = _Part(digest, gate)
        return part

    def _refuse(self, rpc: str, name: str, body: bytes, reason: str) -> RefusedError:
        self._door.refuse(body, name, self._door.call(rpc, "", "refused here"), "sent", reason)
        return RefusedError(f"{rpc}: {reason}")


class _Answered(Exception):  # noqa: N818 it is an answer
    """The server answered with an error of its own, which the SuperNode is given."""

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.content = content


def plan_of(config: FlowerConfig, run: str, app_sha256: str, release: str) -> FlowerPlan:
    """What a run's replies may hold, as the hospital's file declares it. What the server makes of it reaches others."""
    required = (Exposure.PROTOCOL, Exposure.IDENTITY, *config.flower.classes, Exposure.PEER_DERIVED)
    exposed = tuple(dict.fromkeys(required))
    return FlowerPlan(run, config.coordinator_identity, config.flower.records, exposed, app_sha256, release)


def missing_for(file: ConsentFile, plan: FlowerPlan) -> Missing:
    """What a consent lacks for a run of an app."""
    missing = file.missing_for(plan)
    return missing if file.consent.rounds else dataclasses.replace(missing, rounds=1)


def _check_form(request: Any) -> None:
    """Where a request has room for text, it holds what belongs there and nothing else."""
    if getattr(request, "message_ids", ()):
        raise RefusedError("it asks for messages by name, which a SuperNode does not")
    if hasattr(request, "public_key"):
        check_public_key(request.public_key)
    for name in ("hash_str", "message_object_id", "object_id"):
        if hasattr(request, name) and not is_object_id(getattr(request, name)):
            raise RefusedError(f"its {name} is no hash")


def _hide_runtime(announcement: Any) -> None:
    """How long the app ran tells how much it was given to learn from; the server is told nought."""
    announcement.clientapp_runtime_list[:] = [0.0] * len(announcement.clientapp_runtime_list)


def _run_of(request: Any) -> str | None:
    return _run_name(request.run_id) if hasattr(request, "run_id") else None


def _run_name(number: int) -> str:
    return f"{METHOD}-{number}"


def _remember(known: OrderedDict[str, Any], name: str, value: Any, most: int) -> None:
    known[name] = value
    if len(known) > most:
        known.popitem(last=False)
