"""What was sent can be kept, opened and deleted, and the proof does not depend on it."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from safetensors.torch import load_file

from tests.support.runs.federation import Federation

Make = Callable[..., Federation]


def test_kept_messages_show_the_very_tensors_that_the_coordinator_has(federation: Make) -> None:
    one = federation()
    for name in one.silos:
        one.write_silo(name, keep_sent_days=30)
    one.run_to_the_end()
    state = one.folder / "state"
    told = one.command("silo", "audit", "open", "--config", "hospital1.yaml", "--round", "2")
    assert "MODEL_PARAMETERS_CLASSIFIER" in told
    opened = {
        name: tensor
        for path in (state / "hospital1" / "opened").glob("*-round2-*-MODEL_PARAMETERS_*.safetensors")
        for name, tensor in load_file(path).items()
    }
    (arrived,) = (state / "coordinator").rglob("*round*1*/upload-hospital1-*.safetensors")
    received = {key.split("/")[-1]: tensor for key, tensor in load_file(arrived).items()}
    assert opened.keys() == received.keys()
    assert all(torch.equal(opened[name], received[name]) for name in opened)
    kept = list((state / "hospital1" / "sent").iterdir())
    assert kept
    plain = next(iter(opened.values())).contiguous().numpy().tobytes()[:64]
    for path in kept:
        assert plain not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0

    for path in kept:
        path.unlink()
    told = one.command("silo", "audit", "open", "--config", "hospital1.yaml")
    assert "its record in the journal stands" in told.replace("\n", " ")
    verified = json.loads(one.command("silo", "audit", "verify", "--config", "hospital1.yaml", "--json"))
    assert verified["sound"]
    assert verified["acknowledged"] == verified["sent"]
