"""The character GPT with one fault, at a place and not at a time.

Usage: faulty_chargpt.py FAULT OPTIONS..., where FAULT is one of
    checkpoint:N    the process is killed (SIGKILL) in the middle of writing its N-th checkpoint's data
    rank:R:N        rank R is killed at the beginning of its step N, or when there is a checkpoint if that is later
    slot:S:N        who is in slot S of an elastic run, or began as rank S, is killed at the beginning of step N
    still:S:N       ... is stopped (SIGSTOP) there
    updated:S:N:M   ... is killed there, and who is started in its place has other code; step M is taken when that one is there
    unclaimed:N:M   rank 0 is killed there, and until step M the share takes nothing: no claim of the attempt, no metrics
    untold:N        rank 0 is killed when all have taken step N, before it tells of it
    raises:R:N      rank R raises an error at the beginning of its step N
    await:N         rank 0 does not begin step N before a stop signal has come
    gate:N:FILE     rank 0 does not begin step N before there is this file
    nan:R:N         rank R's loss is not a number at step N
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import thread_writer
from tiny import wait_for_checkpoints
from waiting import wait_until

import hpctrain.exchange.agreement
import hpctrain.loop
import hpctrain.run
from hpctrain.checkpoint.writing import files
from hpctrain.elastic.member import Membership
from hpctrain.env import StopRequest
from hpctrain.examples import chargpt
from hpctrain.examples.chargpt import main
from hpctrain.metrics import MetricsFile
from hpctrain.run import Run


def die_in_data_file(number: int) -> None:
    """Half of a block of the n-th data file is written, then the process is gone."""
    real_write, real_new = files.write_block, files.write_new
    state = {"data_files": 0}

    def write_new(path, pieces, **options):  # noqa: ANN001, ANN003, ANN202
        state["data_files"] += path.name.startswith("data-")
        return real_new(path, pieces, **options)

    def write_block(direct: int | None, plain: int, block: memoryview, at: int) -> None:
        if state["data_files"] == number:
            real_write(None, plain, block[: len(block) // 2], at)
            os.kill(os.getpid(), signal.SIGKILL)
        real_write(direct, plain, block, at)

    files.write_new, files.write_block = write_new, write_block


def at_step(wanted_rank: int, number: int, act) -> None:  # noqa: ANN001
    """Call `act` when a rank begins a step (from 1)."""
    real = hpctrain.loop.seed_step

    def seed_step(seed: int, step: int, rank: int) -> None:
        if step + 1 == number and rank == wanted_rank:
            act()
        real(seed, step, rank)

    hpctrain.loop.seed_step = seed_step


def in_slot(slot: int, number: int, act) -> None:  # noqa: ANN001
    """Call `act` when who is in a slot of an elastic run, or began as that rank, begins a step, whatever its rank is then."""
    if os.environ.get("HPCTRAIN_SLOT", os.environ.get("OMPI_COMM_WORLD_RANK")) == str(slot):
        for rank in range(8):
            at_step(rank, number, act)


def mark() -> Path:
    """A file that says that a fault has come."""
    return Path(sys.argv[sys.argv.index("--out") + 1]).with_suffix(".fault")


def die_once() -> None:
    if not mark().exists():
        mark().touch()
        die_with_a_checkpoint()


def update(slot: int, number: int, until: int) -> None:
    """Kill who is in a slot, and have the next one there say that it has another file."""
    if os.environ["HPCTRAIN_SLOT"] == str(slot):
        in_slot(slot, number, die_once)
        if mark().exists():
            real = hpctrain.exchange.agreement.code_hashes
            hpctrain.exchange.agreement.code_hashes = lambda: real() | {"hpctrain.loop": "other"}
        return
    joined: list[Membership] = []
    real_init = Membership.__init__

    def init(self: Membership, environ) -> None:  # noqa: ANN001
        joined.append(self)
        real_init(self, environ)

    Membership.__init__ = init
    at_step(0, until, lambda: wait_until(lambda: joined[0].changing, what="who comes instead"))


def refuse_writes(number: int, until: int) -> None:
    """Kill rank 0 once; then the share takes a claim and metrics from step `until` on."""
    at_step(0, number, die_once)
    taken: list[int] = []
    for rank in range(8):
        at_step(rank, until, lambda: taken.append(until))

    def refusing(real):  # noqa: ANN001, ANN202
        def write(*arguments):  # noqa: ANN002, ANN202
            if mark().exists() and not taken:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        return write

    hpctrain.run.claim, hpctrain.run.CLAIM_AGAIN_S = refusing(hpctrain.run.claim), 0.0
    MetricsFile._append = refusing(MetricsFile._append)


def before_telling(number: int) -> None:
    """Kill rank 0 when step `number` is over."""
    real = Run._report

    def tell(self: Run, report, *others) -> None:  # noqa: ANN001, ANN002
        if self.is_first and report.step == number:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, report, *others)

    Run._report = tell


def die_with_a_checkpoint() -> None:
    """Kill this rank when there is something to go on from: steps are done long before they are written."""
    published = Path(sys.argv[sys.argv.index("--out") + 1]) / "checkpoints"
    wait_until(lambda: list(published.glob("step-*.json")), what="a checkpoint")
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("a fault of the test's")


def await_stop() -> None:
    seen: list[int] = []
    real = StopRequest._note

    def note(self: StopRequest, number: int, frame) -> None:  # noqa: ANN001
        seen.append(number)
        real(self, number, frame)

    StopRequest._note = note
    at_step(0, int(arguments[0]), lambda: wait_until(lambda: seen, what="a stop signal"))


def loss_is_nan() -> None:
    rank, number = map(int, arguments)
    real = chargpt.mean_loss
    poisoned: list[bool] = []
    at_step(rank, number, lambda: poisoned.append(True))
    chargpt.mean_loss = lambda *of: real(*of) * (float("nan") if poisoned else 1.0)


if __name__ == "__main__":
    kind, *arguments = sys.argv[1].split(":")
    match kind:
        case "checkpoint":
            wait_for_checkpoints()  # a run this small is over before the n-th is begun else
            thread_writer.install()
            die_in_data_file(int(arguments[0]))
        case "rank":
            at_step(int(arguments[0]), int(arguments[1]), die_with_a_checkpoint)
        case "slot":
            in_slot(int(arguments[0]), int(arguments[1]), lambda: os.kill(os.getpid(), signal.SIGKILL))
        case "still":
            in_slot(int(arguments[0]), int(arguments[1]), lambda: os.kill(os.getpid(), signal.SIGSTOP))
        case "updated":
            update(*map(int, arguments))
        case "unclaimed":
            refuse_writes(*map(int, arguments))
        case "untold":
            before_telling(int(arguments[0]))
        case "raises":
            at_step(int(arguments[0]), int(arguments[1]), fail)
        case "await":
            await_stop()
        case "gate":
            at_step(0, int(arguments[0]), lambda: wait_until(Path(arguments[1]).exists, what="the gate to open"))
        case "nan":
            loss_is_nan()
    sys.exit(main(sys.argv[2:]))
