"""A run that fails in mid-epoch, on purpose, in a service that goes on: what is left of it is the error.

    python examples/fails.py

The backend is `double`, a device made of host memory that is counted to the byte: so it can be seen on
any machine that nothing of the failed run stays, although the service keeps the error it raised.
"""

import torch
import torch.nn.functional as F
from torch import nn

import interlock as il

BROKEN_AT = 25


class CorruptRecord(Exception):
    """What a storage layer might raise."""


class Records:
    """Batches that can be iterated once per epoch; one of them may be broken."""

    def __init__(self, broken_at: int | None = None) -> None:
        self.broken_at = broken_at
        self.made = [(torch.randn(32, 16), torch.randint(0, 4, (32,))) for _ in range(40)]

    def __len__(self) -> int:
        return len(self.made)

    def __iter__(self):
        for number, batch in enumerate(self.made):
            if number == self.broken_at:
                raise CorruptRecord(f"record {number}: checksum does not match")
            yield batch


def make_task(name: str, broken_at: int | None = None) -> il.Task:
    return il.Task(
        name=name,
        model=lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), 1e-3),
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        data=lambda: Records(broken_at),
        epochs=2,
    )


task = make_task("broken", BROKEN_AT)
"""For the command line: `interlock fit examples/fails.py:task`."""


def main() -> None:
    engine = il.Engine("double")
    errors: list[BaseException] = []  # a service keeps them, for its job records
    for job in (make_task("first"), task, make_task("third")):
        outcome = engine.start(job).wait(timeout=60)
        print(f"\n{job.name}: {outcome.status}, {outcome.verdict}, after {outcome.steps} steps")
        print("  phases:  " + " -> ".join(outcome.phase_seconds))
        print(f"  residue: {outcome.residue}")
        if outcome.error is not None:
            print(f"  error:   {outcome.failure}")
            errors.append(outcome.error)
    assert [type(error) for error in errors] == [CorruptRecord]  # the very object that was raised
    print(f"\nthe service goes on; it keeps {errors[0]!r}, which holds no tensor")


if __name__ == "__main__":
    main()
