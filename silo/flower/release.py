"""The one release of Flower whose messages the door knows: its schemas by their hash, and each field's class.

The schemas are not part of Medsilo. They are read out of the hospital's own installation of ``flwr``, by its Python.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from privacy.errors import ConfigurationError
from privacy.exposure import Exposure
from privacy.foreign_door import ForeignSchema

VERSION = "1.42.0"
SCHEMA_SHA256 = "27767e9ec363293cb023a8e85dd84c2463e1b86b81b33fa3fdc5566719920b12"
"""Over the descriptors of ``fleet.proto`` and what it imports, in the order in which ``_DUMP`` gives them."""
PROTOCOL = f"Flower {VERSION} (Fleet API, protobuf over HTTPS)"
PACKAGE = "flwr.proto"
_DUMP_SECONDS = 120
_DUMP = """
import base64, importlib.metadata, json
from flwr.proto import fleet_pb2
files = {}
def add(file):
    for each in file.dependencies:
        add(each)
    files.setdefault(file.name, base64.b64encode(file.serialized_pb).decode())
add(fleet_pb2.DESCRIPTOR)
print(json.dumps({"version": importlib.metadata.version("flwr"), "files": list(files.values())}))
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
"""The field whose bytes ``silo.flower.objects`` attributes one by one."""

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


def read_schema(python: Path) -> ForeignSchema:
    """The schemas of the ``flwr`` that an environment's ``python`` finds.

    Raises ``ConfigurationError`` if there is none, or it is not the release that is known here.
    """
    at = f"flower: python: {python}"
    try:
        done = subprocess.run(  # noqa: S603 the hospital's own file names it
            [python, "-I", "-c", _DUMP], capture_output=True, text=True, timeout=_DUMP_SECONDS, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ConfigurationError(f"{at}: it has no `flwr` that can be read ({last}); install flwr=={VERSION} there")
        found = json.loads(done.stdout.splitlines()[-1])
        files = [base64.b64decode(file) for file in found["files"]]
    except OSError as error:
        raise ConfigurationError(f"{at}: cannot be started: {error.strerror}") from None
    except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(f"{at}: did not give Flower's schemas: {error}") from None
    digest = hashlib.sha256(b"".join(files)).hexdigest()
    if (found["version"], digest) != (VERSION, SCHEMA_SHA256):
        raise ConfigurationError(
            f"{at}: it has flwr {found['version']} with the schemas {digest[:16]}…; this release of Medsilo knows the "
            f"messages of flwr {VERSION} alone ({SCHEMA_SHA256[:16]}…), and lets no others pass"
        )
    return ForeignSchema(files, EXPOSURES, split=CONTENT)
