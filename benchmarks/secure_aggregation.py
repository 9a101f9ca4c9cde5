"""What masks cost a silo in a round: 100 silos, 44k parameters. Beside it, in the same run, an epoch of local training.

Measured is all that one silo does beyond an unmasked round: its key's statement, the check of the other silos'
statements (in the first round with their certificates, later without, as the daemon remembers those), the encoding, the
key agreement, the masks. The floor is the bare key stream (AES-256 in counter mode, of `cryptography`) of the same
bytes. Each is measured several times, in turn, as processor time of one thread, so that other work on the machine
disturbs less. And what the coordinator does: adding up, in memory.

    python benchmarks/secure_aggregation.py [--silos 100] [--repeats 15] [--out FILE.json]

Synthetic images; nothing about accuracy is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from securesystemslib import dsse

from medsilo.algorithms.families.sharing import count_part, model_upload
from medsilo.algorithms.models import Layout, build, state_of
from medsilo.algorithms.protection.masked import encode_upload, masked_payload, mean_of
from medsilo.algorithms.tensors import MemoryWorkspace
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, SecureAggregationPlan, TrainingPlan
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.certificates import load_credentials
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys, load_audit_key
from medsilo.privacy.secure_aggregation import mask_keys
from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey, Occasion, Roster, certify, vouch
from medsilo.silo.data.settings import PracticalGroups
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.silo.training.site import LocalSite

MODEL = ModelPlan(name="diversifed-cnn", input_shape=(3, 28, 28), classes=9)
OCCASION = Occasion("bench", "bench", bytes(32), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.silos, options.repeats)
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def measure(folder: Path, silos: int, repeats: int) -> dict[str, object]:
    create_authority(folder / "ca", "bench")
    parties = [enrol(folder, f"silo-{number:03}") for number in range(silos)]
    private = [X25519PrivateKey.generate() for _ in parties]
    keys = [state(own, party) for own, party in zip(private, parties, strict=True)]
    messages = [key.to_message() for key in keys]
    ca_pem = (folder / "ca" / "ca.pem").read_bytes()
    plan = SecureAggregationPlan(minimum=3, rounds=1)
    model = build(MODEL, seed=1)
    layout = Layout.of(model)
    upload = {**model_upload(state_of(model), layout), Exposure.SAMPLE_COUNT: count_part(500)}
    roster = Roster(keys)
    site = training_site()

    def check() -> None:
        Roster.read(messages, OCCASION, ca_pem=ca_pem).check(keys[0], minimum=3, audit_keys={})

    def check_first() -> None:
        mask_keys._vouched.cache_clear()
        check()

    def mask() -> None:
        numbers = encode_upload(upload, plan, silos)[1]
        masked_payload(upload, roster.mask(keys[0], private[0], numbers))

    numbers = encode_upload(upload, plan, silos)[1]

    def stream() -> None:
        zeros, room = memoryview(bytes(numbers.nbytes)), np.empty(numbers.nbytes + 63, dtype=np.uint8)
        for number in range(silos - 1):
            cipher = Cipher(algorithms.AES256(number.to_bytes(32, "big")), modes.CTR(bytes(16))).encryptor()
            cipher.update_into(zeros, room.data)

    masked = [masked_payload(upload, roster.mask(k, p, numbers)) for k, p in zip(keys, private, strict=True)]
    parts = {exposure: part.specs for exposure, part in upload.items()}
    tasks: dict[str, Callable[[], object]] = {
        "statement": lambda: state(private[0], parties[0]),
        "check_of_statements": check,
        "check_of_statements_and_certificates": check_first,
        "encoding_keys_and_masks": mask,
        "bare_key_stream": stream,
        "epoch_of_training_500_images": lambda: site.fit(0),
        "coordinators_sum": lambda: mean_of(masked, parts, plan, MemoryWorkspace()),
    }
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            began = time.process_time()
            task()
            times[name].append(1000 * (time.process_time() - began))
    median = {name: statistics.median(found) for name, found in times.items()}
    least = {name: min(found) for name, found in times.items()}
    whole = ("statement", "check_of_statements", "encoding_keys_and_masks")
    return {
        "silos": silos,
        "parameters": sum(int(np.prod(spec.shape)) for spec in layout.parameters),
        "bytes_up": numbers.nbytes,
        "bytes_up_unmasked": sum(part.nbytes for part in upload.values()),
        "mask_key_bytes": messages[0].ByteSize(),
        "milliseconds_median": {name: round(value, 2) for name, value in median.items()},
        "milliseconds_least": {name: round(value, 2) for name, value in least.items()},
        "whole_milliseconds": {
            "median": round(sum(median[name] for name in whole), 1),
            "least": round(sum(least[name] for name in whole), 1),
        },
        "masks_to_bare_key_stream": round(median["encoding_keys_and_masks"] / median["bare_key_stream"], 2),
        "masks_to_epoch_of_training": round(
            median["encoding_keys_and_masks"] / median["epoch_of_training_500_images"], 3
        ),
        "whole_to_epoch_of_training": round(
            sum(median[name] for name in whole) / median["epoch_of_training_500_images"], 3
        ),
        "repeats": repeats,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }


def enrol(folder: Path, name: str) -> tuple[Identity, Ed25519PrivateKey, dsse.Envelope]:
    identity = Identity("bench", "silo", name)
    keys = create_keys(folder / name, identity)
    issue(folder / "ca", name, keys.request, folder / name / "tls.pem")
    credentials = load_credentials(
        ca=folder / "ca" / "ca.pem", certificate=folder / name / "tls.pem", key=keys.tls_key, expected=identity
    )
    audit_key = load_audit_key(keys.audit_key)
    return identity, audit_key, vouch(credentials, audit_key)


def state(private: X25519PrivateKey, party: tuple[Identity, Ed25519PrivateKey, dsse.Envelope]) -> CertifiedKey:
    identity, audit_key, voucher = party
    return certify(private, OCCASION, bytes(32), identity=identity, audit_key=audit_key, voucher=voucher)


def training_site() -> LocalSite:
    setting = PracticalGroups(groups=(1, 1, 1), train_per_silo=500, test_per_silo=10)
    shard = cut(generate_tissue(seed=1, train=2700, test=90), setting, seed=1)[0]
    plan = RunPlan(
        federation="bench",
        coordinator="coordinator",
        run="bench",
        method=MethodPlan(name="fedavg", parameters={}),
        model=MODEL,
        training=TrainingPlan(epochs=1),
        rounds=1,
        seed=1,
        required=(),
    )
    return LocalSite(shard.name, shard, build(MODEL, seed=1), plan, device=torch.device("cpu"))


if __name__ == "__main__":
    main()
