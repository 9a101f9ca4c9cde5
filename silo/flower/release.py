"""Which releases of Flower pass: those whose schemas are known here by their hashes; and each field's class.

What counts is what a release sends, not what it is called. docs/flower.md says how to add one. The schemas are not
part of Medsilo. They are read out of the hospital's own installation of ``flwr``, by its Python.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from medsilo.privacy.door.foreign_door import ForeignSchema
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import Exposure

TRIED = ("1.40.0", "1.41.0", "1.42.0")
"""Releases with which whole runs went through the door; their schemas are equal, byte for byte."""
SCHEMAS = {
    "flwr/proto/node.proto": {"381d11df10d82dd10499aa56356dfa0fb777008a9a461f0d6d2297dd43c0feb2"},
    "flwr/proto/heartbeat.proto": {"6e97be2cf781ed9f5f17568ff34edb58890d9f938c23740209224f2038361951"},
    "flwr/proto/transport.proto": {"fe258878c24cf39e1c3d163d034942c04e14bff1d310371189020019860fbe07"},
    "flwr/proto/run.proto": {"78750e949f409c7208f05a93e73edf9d3261c070c8b1a35f7f4ec51ae56762f8"},
    "flwr/proto/fab.proto": {"7909c68e8e9d9db0e751da7cd9f185e195f49671d150a88d21b04009b7d697b3"},
    "flwr/proto/error.proto": {"7e6a1123a82c27e2eff19278101b5b63014e74516787f012846e2b843918d333"},
    "flwr/proto/recorddict.proto": {"81266a582e9ca57c4f0d37b2e1495e89adc657cdcb3626f543e50d1a5086eb71"},
    "flwr/proto/message.proto": {"0d97a1559704bbab5ee06716899cd6d56ce142984c6bc4c7a0e9dc11cd3dce72"},
    "flwr/proto/fleet.proto": {"1335854522f5a685f94a3e49c1bc090cbcfcb5b63c9ca260a985f7b10fd61056"},
}
"""SHA-256 of each descriptor that passes: of ``fleet.proto`` and of what it imports."""
PACKAGE = "flwr.proto"
_INSTALL = f"install flwr {', '.join(TRIED[:-1])} or {TRIED[-1]} there"
_VERSION_FORM = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}", re.ASCII)
_DUMP_SECONDS = 120
_DUMP = """
import base64, importlib.metadata, importlib.util, json
from flwr.proto import fleet_pb2
files = {}
def add(file):
    for each in file.dependencies:
        add(each)
    files.setdefault(file.name, base64.b64encode(file.serialized_pb).decode())
add(fleet_pb2.DESCRIPTOR)
http = importlib.util.find_spec("flwr.supernode.fleet_http_client") is not None
print(json.dumps({"version": importlib.metadata.version("flwr"), "http": http, "files": files}))
"""


@dataclass(frozen=True)
class Rpc:
    """A call of the Fleet API. ``request``, ``response``: its messages' full names. ``purpose``: for the journal."""

    name: str
    request: str
    response: str
    purpose: str

    @classmethod
    def of(cls, name: str, purpose: str, message: str = "") -> Rpc:
        """``message``: what its messages are called, where that is not the call's name."""
        stem = f"{PACKAGE}.{message or name}"
        return cls(name, f"{stem}Request", f"{stem}Response", purpose)

    @property
    def path(self) -> str:
        """Where the server takes it."""
        return "/v1/fleet/" + re.sub(r"(?<!^)(?=[A-Z])", "-", self.name).lower()


RPCS = {
    rpc.path: rpc
    for rpc in (
        Rpc.of("RegisterNode", "register this node", "RegisterNodeFleet"),
        Rpc.of("ActivateNode", "say that this node is there"),
        Rpc.of("DeactivateNode", "say that this node goes"),
        Rpc.of("UnregisterNode", "take this node off the list", "UnregisterNodeFleet"),
        Rpc.of("SendNodeHeartbeat", "say that this node is still there"),
        Rpc.of("PullMessages", "ask for work"),
        Rpc.of("PushMessages", "announce a reply"),
        Rpc.of("GetRun", "ask which app a run is of"),
        Rpc.of("GetFab", "ask for the app"),
        Rpc.of("PushObject", "send a part of a reply"),
        Rpc.of("PullObject", "ask for a part of a message"),
        Rpc.of("ConfirmMessageReceived", "say that a message has come"),
    )
}
"""By path."""

CONTENT = "PushObjectRequest.object_content"
"""The field whose bytes ``medsilo.silo.flower.objects`` attributes one by one."""

_CLASSES: dict[Exposure, str] = {
    Exposure.IDENTITY: """
        Node.node_id RegisterNodeFleetRequest.public_key RegisterNodeFleetResponse.node_id
        ActivateNodeRequest.public_key ActivateNodeResponse.node_id DeactivateNodeRequest.node_id
        UnregisterNodeFleetRequest.node_id Metadata.src_node_id Metadata.dst_node_id
        """,
    Exposure.PROTOCOL: """
        ActivateNodeRequest.heartbeat_interval SendNodeHeartbeatRequest.node SendNodeHeartbeatRequest.heartbeat_interval
        SendNodeHeartbeatResponse.success PullMessagesRequest.node PullMessagesRequest.message_ids
        PullMessagesResponse.reconnect PullMessagesResponse.messages_list PullMessagesResponse.message_object_trees
        Reconnect.reconnect Message.metadata Message.content Message.error Metadata.run_id Metadata.message_id
        Metadata.reply_to_message_id Metadata.group_id Metadata.ttl Metadata.message_type Metadata.created_at
        Metadata.src_task_id Metadata.dst_task_id Error.code Error.reason ObjectTree.object_id ObjectTree.children
        PushMessagesRequest.node PushMessagesRequest.messages_list PushMessagesRequest.message_object_trees
        PushMessagesRequest.clientapp_runtime_list PushMessagesResponse.reconnect PushMessagesResponse.results
        PushMessagesResponse.ResultsEntry.key PushMessagesResponse.ResultsEntry.value
        PushMessagesResponse.objects_to_push PushMessagesResponse.session_id GetRunRequest.node GetRunRequest.run_id
        GetRunResponse.run Run.run_id Run.fab_id Run.fab_version Run.override_config Run.OverrideConfigEntry.key
        Run.OverrideConfigEntry.value Scalar.double Scalar.uint64 Scalar.sint64 Scalar.bool Scalar.string Scalar.bytes
        Run.fab_hash Run.pending_at Run.starting_at Run.running_at Run.finished_at Run.status RunStatus.status
        RunStatus.sub_status RunStatus.details Run.flwr_aid Run.federation Run.bytes_sent Run.bytes_recv
        Run.clientapp_runtime Run.primary_task_type Run.primary_task_id Run.series_id Run.account_name
        GetFabRequest.node GetFabRequest.hash_str GetFabRequest.run_id GetFabResponse.fab Fab.hash_str Fab.content
        Fab.verifications Fab.VerificationsEntry.key Fab.VerificationsEntry.value PushObjectRequest.node
        PushObjectRequest.run_id PushObjectRequest.object_id PushObjectRequest.object_content
        PushObjectRequest.session_id PushObjectResponse.stored PullObjectRequest.node PullObjectRequest.run_id
        PullObjectRequest.object_id PullObjectResponse.object_found PullObjectResponse.object_available
        ConfirmMessageReceivedRequest.node ConfirmMessageReceivedRequest.run_id
        ConfirmMessageReceivedRequest.message_object_id RecordDict.items
        """,
    # What the server sends may be made from other hospitals' replies; nothing in it says whether it is.
    Exposure.PEER_DERIVED: "PullObjectResponse.object_content",
}
EXPOSURES = {name: exposure for exposure, names in _CLASSES.items() for name in names.split()}


@dataclass(frozen=True)
class Release:
    """An installed ``flwr``: its ``version``, as its requests name it, and its messages."""

    version: str
    schema: ForeignSchema

    @property
    def protocol(self) -> str:
        """What it speaks, in words, for the journal."""
        return f"Flower {self.version} (Fleet API, protobuf over HTTPS)"


def read_release(python: Path) -> Release:
    """The ``flwr`` that an environment's ``python`` finds.

    Raises ``ConfigurationError`` if there is none, its messages are not all known here, or it does not send them by
    HTTPS.
    """
    at = f"flower: python: {python}"
    try:
        done = subprocess.run(  # noqa: S603 the hospital's own file names it
            [python, "-I", "-c", _DUMP], capture_output=True, text=True, timeout=_DUMP_SECONDS, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ConfigurationError(
                f"{at}: it has no `flwr` that can be read ({last}); install flwr=={TRIED[-1]} there"
            )
        found = json.loads(done.stdout.splitlines()[-1])
        files = {str(name): base64.b64decode(file) for name, file in found["files"].items()}
        version = str(found["version"])
        by_https = bool(found["http"])
    except OSError as error:
        raise ConfigurationError(f"{at}: cannot be started: {error.strerror}") from None
    except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{at}: did not give Flower's schemas: {error}") from None
    digests = {name: hashlib.sha256(file).hexdigest() for name, file in files.items()}
    others = [f"{name} ({digest})" for name, digest in digests.items() if digest not in SCHEMAS.get(name, ())]
    others += [f"{name} (absent)" for name in SCHEMAS if name not in digests]
    if others or _VERSION_FORM.fullmatch(version) is None:
        raise ConfigurationError(
            f"{at}: it has flwr {version!r:.40}, and these of its schemas are not among the known ones: "
            f"{', '.join(others)}. Nothing passes of which it is not known what each field holds; {_INSTALL}, or add "
            "the release (docs/flower.md)"
        )
    if not by_https:
        raise ConfigurationError(
            f"{at}: the messages of flwr {version} are known, but it sends them by gRPC, and this door takes requests "
            f"over HTTPS; {_INSTALL}"
        )
    return Release(version, ForeignSchema(list(files.values()), EXPOSURES, split=CONTENT))
