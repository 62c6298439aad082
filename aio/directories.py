"""Directories of drives that differ by rank: "/mnt/nvme{local_rank}" is /mnt/nvme0 on the first rank of a node.

A pattern is checked when a policy is made, and resolved when a model is offloaded: ranks may not know their number before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_FIELDS = re.compile(r"\{(rank|local_rank)\}")


def check_pattern(path: Path) -> None:
    """Raises ValueError for braces that are neither {rank} nor {local_rank}."""
    if re.search(r"[{}]", _FIELDS.sub("", str(path))):
        raise ValueError(
            f"nvme={str(path)!r} has braces of no known meaning; '{{rank}}' stands for a rank's number, and '{{local_rank}}' for "
            "its number within its node"
        )


def is_pattern(path: Path) -> bool:
    """Whether a directory depends on the rank."""
    return _FIELDS.search(str(path)) is not None


def resolve(paths: Sequence[Path], *, rank: int, local_rank: int) -> tuple[Path, ...]:
    """The directories of one rank. What is no pattern stays as it is, and is checked by those who open it.

    Raises: ValueError naming pattern and directory, for one that is missing, and for two that are the same on this rank.
    """
    numbers = {"rank": rank, "local_rank": local_rank}
    found: list[Path] = []
    for path in paths:
        place = Path(_FIELDS.sub(lambda field: str(numbers[field[1]]), str(path)))
        if place != path and not place.is_dir():
            what = "is not a directory" if place.exists() else "does not exist"
            raise ValueError(
                f"nvme={str(path)!r} is {str(place)!r} on rank {rank} (local rank {local_rank}), which {what}; create it, or "
                "give each rank a directory that it has"
            )
        earlier = next((index for index, other in enumerate(found) if other.resolve() == place.resolve()), None)
        if earlier is not None:
            raise ValueError(
                f"nvme={str(paths[earlier])!r} and {str(path)!r} are both {str(place.resolve())!r} on rank {rank} (local rank "
                f"{local_rank}): name each directory once"
            )
        found.append(place)
    return tuple(found)
