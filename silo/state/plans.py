"""The plans that a silo has: from a file that it was given, or the one that it saw last."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.files.configuration import explain
from medsilo.privacy.files.durable import write_atomically
from medsilo.silo.state.config import SiloConfig


def read_plan(path: Path) -> RunPlan:
    """A plan as ``coordinator plan`` prints it; raises ``ConfigurationError`` naming what is wrong with the file."""
    try:
        return RunPlan.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: there is no such file") from None
    except ValidationError as error:
        raise ConfigurationError("\n".join(f"{path}: {line}" for line in explain(error, RunPlan))) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: is not a plan ({error}); make one with `coordinator plan`") from None


def known_plan(config: SiloConfig) -> RunPlan:
    """The plan that this silo was shown last; raises ``ConfigurationError`` if it has seen none."""
    if not config.last_plan.exists():
        raise ConfigurationError(
            "this silo has not seen a plan yet; ask the coordinator's operator for the output of `coordinator plan` "
            "and give it with --plan"
        )
    return read_plan(config.last_plan)


def keep_plan(config: SiloConfig, plan: RunPlan) -> None:
    """Keeps what the coordinator leads now, for what is looked at before it is agreed to."""
    content = json.dumps(plan.model_dump(mode="json"), indent=2).encode()
    if not config.last_plan.exists() or config.last_plan.read_bytes() != content:
        write_atomically(config.last_plan, content)
