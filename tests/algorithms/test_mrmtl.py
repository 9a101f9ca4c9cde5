"""MR-MTL: its models against the formula in float64, its limiting case, its range."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from medsilo.algorithms.local import Local
from medsilo.algorithms.method import Federation, Round
from medsilo.algorithms.models import Layout, state_of
from medsilo.algorithms.mrmtl import MRMTL
from medsilo.algorithms.tensors import MemoryWorkspace, Payload
from medsilo.privacy.errors import ConfigurationError
from medsilo.silo.training.site import LocalSite
from tests.support.methods.tiny_federation import run_plan, shard, simulate

RATE, STEPS, ROUNDS = 0.05, 3, 4


def linear() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 3))


def test_two_silos_go_where_the_formula_leads() -> None:
    """Softmax regression, all images in each step: w_k ← w_k − η (∇F_k(w_k) + λ (w_k − w̄)), w̄ the mean of the w_k as
    they were at the end of the round before."""
    method = MRMTL(proximal_weight=0.7)
    plan = run_plan(method, rounds=ROUNDS)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"epochs": STEPS, "batch_size": 24})})
    halves = {}
    for name in ("a", "b"):
        site = LocalSite(name, shard(name, seed=ord(name)), linear(), plan, device=torch.device("cpu"))
        halves[name] = method.silo_half(site)
        halves[name].begin(state_of(site.model))
    coordinator = method.coordinator_half(Federation(Layout.of(linear()), rounds=ROUNDS, seed=1, silos=("a", "b")))

    # The last column of x and of w is the bias.
    start = state_of(linear())
    w = dict.fromkeys("ab", np.column_stack([start["1.weight"], start["1.bias"]]).astype(np.float64))
    mean = None
    download: Payload = {}
    for number in range(ROUNDS):
        for name, half in halves.items():
            half.train(number, download)
            images, labels = half.site.train_data()
            x = np.column_stack([images.flatten(1).numpy().astype(np.float64), np.ones(len(images))])
            for _ in range(STEPS):
                scores = np.exp(x @ w[name].T)
                gradient = (scores / scores.sum(axis=1, keepdims=True) - np.eye(3)[labels]).T @ x / len(x)
                w[name] = w[name] - RATE * (gradient + (0.0 if mean is None else 0.7 * (w[name] - mean)))
        uploads = {name: half.upload() for name, half in halves.items()}
        download = coordinator.aggregate(Round(number, uploads, uploads, MemoryWorkspace())).for_silo("a")
        mean = (w["a"] + w["b"]) / 2
    for name, half in halves.items():
        found = half.personal()
        np.testing.assert_allclose(np.column_stack([found["1.weight"], found["1.bias"]]), w[name], atol=2e-6)
    assert np.abs(w["a"] - w["b"]).max() > 0.01, "else it would not show which silo has which"


def test_without_the_term_it_is_separate_training_to_the_last_bit() -> None:
    alone, none, held = (simulate(method, rounds=3) for method in (Local(), MRMTL(proximal_weight=0.0), MRMTL()))
    for name, half in alone.silos.items():
        for key, tensor in half.personal().items():
            assert torch.equal(tensor, none.silos[name].personal()[key])
            assert not torch.equal(tensor, held.silos[name].personal()[key])


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"proximal_weight is -0.1; it must be 0 or more"):
        MRMTL(proximal_weight=-0.1)
