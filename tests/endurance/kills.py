"""SIGKILL at random moments of runs of one and two ranks, on file systems of several kinds. Every
life must begin with the bits of the undisturbed run, and every run must end with them.

    python -m tests.endurance.kills --kills 300

Half of the kills come at a random time, half at a random call on a file (of which a write is torn
then). Half or so are aimed: they are counted from the beginning of a restore, a commit or a save.
Prints where they fell.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.crashes import Job, Kill, kill_often, trajectory
from tests.endurance.file_systems import ALL, NotHere, mounted
from tests.endurance.record import Record, record_in

CASES: dict[str, dict[str, object]] = {
    "durable": {},
    "durable, backward": {"update": "backward"},
    "durable, saves": {"copies": True},
    "saves": {"saves": True},
    "durable, 2 ranks": {"world": 2},
    "durable, saves, 2 ranks": {"world": 2, "copies": True},
}


@dataclasses.dataclass
class Counts:
    """Counts of what was met, by file system."""

    kills: dict[str, collections.Counter[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )

    def add(self, system: str, kill: Kill) -> None:
        """Count a kill."""
        how = "at a call" if kill.delay_s is None else "at a time"
        came = f"went on at the {kill.found} step" if kill.found else "killed again in the restore"
        self.kills[system].update(["kills", how, came, *(f"in {part}" for part in kill.met)])

    def table(self) -> Iterator[str]:
        """Lines of a table, a file system each."""
        columns = sorted(
            {name for found in self.kills.values() for name in found} - {"kills"},
            key=lambda name: (name[:2] != "in", name),
        )
        yield "| file system | kills | " + " | ".join(columns) + " |"
        yield "|" + "---|" * (len(columns) + 2)
        total = collections.Counter[str]()
        for system, found in self.kills.items():
            total.update(found)
            yield self._line(system, found, columns)
        yield self._line("all", total, columns)

    def _line(self, name: str, found: collections.Counter[str], columns: list[str]) -> str:
        cells = " | ".join(str(found[column]) for column in columns)
        return f"| {name} | {found['kills']} | {cells} |"


def campaign(
    place: Path, kills: int, record: Record, *, systems: list[str], seed: int = 0
) -> Counts:
    """Kill so many lives, as evenly spread over file systems and kinds of run as can be."""
    counts, done, begun_s = Counts(), 0, time.monotonic()
    pairs = [(system, case) for system in systems for case in CASES]
    for system in systems:
        try:
            with mounted(ALL[system], place) as there:
                for case, values in CASES.items():
                    index = pairs.index((system, case))
                    share = (index + 1) * kills // len(pairs) - index * kills // len(pairs)
                    job = Job(there / case.replace(", ", "-"), **values)  # type: ignore[arg-type]
                    wanted = trajectory(place / "reference", job.world)
                    for kill in kill_often(
                        job.directory, job, wanted, kills=share, seed=1000 * seed + index
                    ):
                        done += 1
                        counts.add(ALL[system].name, kill)
                        record.add("kill", system=system, case=case, **dataclasses.asdict(kill))
                        left_s = (time.monotonic() - begun_s) / done * (kills - done)
                        record.show(
                            f"{done}/{kills} kills, {ALL[system].name}, {case}: in "
                            f"{', '.join(kill.met)}; {left_s / 60:.0f} min left"
                        )
        except NotHere as error:
            record.add("not here", system=system, why=str(error))
            print(f"NOT TESTED on {ALL[system].name}: {error}", file=sys.stderr)
    record.add("ended", kills=done, table=list(counts.table()))
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=300, help="in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--systems", nargs="+", choices=tuple(ALL), default=list(ALL), help="of files (all)"
    )
    parser.add_argument(
        "--record", type=Path, default=Path("out/kills.jsonl"), help="lines of JSON (%(default)s)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="infinity-kills-") as place:
        with record_in(options.record) as record:
            counts = campaign(
                Path(place), options.kills, record, systems=options.systems, seed=options.seed
            )
    print("\n".join(counts.table()))
    # Fewer where a file system cannot be had here, which was said.
    return 0


if __name__ == "__main__":
    sys.exit(main())
