"""``deadly``, whose faults count from when the run's end has been received: ``ending_silo kill:rpc:3 silo train …``."""

from __future__ import annotations

from typing import Any

from medsilo.silo.run.participation import Participation
from medsilo.silo.uplink import uplink
from tests.support.daemons import deadly


def main() -> None:
    begin = deadly.arm()
    finish = Participation._finish

    def finishing(self: Participation, *arguments: Any) -> None:
        begin()
        finish(self, *arguments)

    Participation._finish = finishing  # type: ignore[method-assign]
    uplink.PARTING_SECONDS = 1
    deadly.run()
