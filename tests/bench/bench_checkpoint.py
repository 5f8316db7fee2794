"""Checkpoints: what training loses to them, until they are durable, their bytes, and how soon they are restored.

Everything on the disk of the working directory; peers (torch.save) and floors (a warm copy, a plain read) in the same run.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hpctrain.checkpoint.encryption import CheckpointKey
from hpctrain.checkpoint.restore import restore_newest
from hpctrain.checkpoint.writing.files import claim
from hpctrain.checkpoint.writing.publish import RetentionPolicy
from hpctrain.checkpoint.writing.writer import ProcessWriter
from tests.bench.checkpoint_world import NO_JOB, World, facts
from tests.bench.figures import Figure, from_samples

GPT_110M = 110_000_000  # parameters; with AdamW's moments three times as many numbers
BASE_EVERY = 100
EVERY = {1: "<= 0.05", 10: "<= 0.015"}  # steps from one increment to the next, and what may be lost
SIZES = {"full, fp32 gradients": {}, "full, bf16 gradients": {"bf16": True}, "90 % frozen": {"frozen": 0.9}}
BARS = {"full, fp32 gradients": ">= 3.4", "full, bf16 gradients": ">= 8", "90 % frozen": ">= 12"}


def run(quick: bool = False) -> list[Figure]:
    """Return all of it; `quick`: smaller states, fewer rounds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR", ".")) as folder:
        here = Path(folder)
        parts = os.environ.get("BENCH_PARTS", "snapshot every-1 every-10 bytes restore encrypted").split()
        figures: list[Figure] = []
        if "snapshot" in parts:
            figures += snapshots(here, GPT_110M // (10 if quick else 1), 3 if quick else 4)
        for every, bar in EVERY.items():
            if f"every-{every}" in parts:
                figures += loop(here, every, bar, 2 if quick else 4)
        if "bytes" in parts:
            figures += sizes(here)
        if "restore" in parts:
            figures += restores(here, 4 if quick else 8)
        if "encrypted" in parts:
            figures += encrypted(here, GPT_110M // (10 if quick else 3), 5 if quick else 9)
        return figures


def snapshots(here: Path, parameters: int, rounds: int) -> list[Figure]:
    """The first snapshots of a state: how long training stands still, and until it is durable."""
    rows = 1000
    tensors = {f"optim.{name}": torch.randn(rows, parameters // rows) * 1e-3 for name in ("w", "m", "v")}
    size_mb = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    warm_s = [_timed(lambda: [to.copy_(tensors[name]) for name, to in own.items()]) for _ in range(2 * rounds)]  # noqa: B023
    writer = ProcessWriter(claim(here / "snapshots", NO_JOB, time.time()), None, 1, RetentionPolicy(keep=1))
    writer.prepare(tensors)
    time.sleep(8)  # as after the first steps of a run
    stalled_s, durable_s = [], []
    for step in range(1, rounds + 1):
        time.sleep(0.5)
        started_s = time.perf_counter()
        stalled_s.append(writer.begin(tensors, facts(step)))
        report = writer.wait()
        durable_s.append(time.perf_counter() - started_s)
        time.sleep(1)  # the one before is removed
        assert report is not None
        assert report.error is None, report.error
    writer.close()
    saved_s = [_timed(lambda: _torch_save(here / "saved.pt", tensors)) for _ in range(rounds)]
    return [
        from_samples(
            f"snapshot of {size_mb:.0f} MB: training waits",
            stalled_s,
            "s",
            bar="<= 1.5x",
            floor=statistics.median(warm_s),
            floor_name="a warm copy",
        ),
        Figure(name="  the first one of the run", value=stalled_s[0], unit="s"),
        from_samples(
            "  until it is durable",
            durable_s,
            "s",
            bar="<= 0.3x",
            floor=statistics.median(saved_s),
            floor_name="torch.save + fsync",
        ),
    ]


def loop(here: Path, every: int, bar: str, turns: int) -> list[Figure]:
    """What a loop loses to an increment after each `every` steps, with a base after each hundred increments.

    That is what it waits for copies, and what its own work takes longer while somebody writes: this by medians of turns with and
    without, because single steps differ by more.
    """
    world = World(8, 512, 8)
    writer = world.writer(here / f"every-{every}", BASE_EVERY)
    log, world.log = world.log, None
    for _ in range(2):
        world.move()
    plain_s: list[float] = []
    beside_s: list[float] = []
    waited_s: list[float] = []
    base_s: list[float] = []
    for turn in range(turns):
        world.log = None
        plain_s += [_timed(world.move) for _ in range(10)]
        world.log = log
        if turn == 0:  # a base, and the increment that chooses
            for steps in (1, every):
                for _ in range(steps):
                    world.move()
                base_s.append(_lost(world, writer))
        else:  # what happened in between is not in the log: this one is of changes
            world.move()
            world.written(writer)
        for number in range(1, 11):
            own_s, lost_s = _step(world, writer, due=number % every == 0)
            beside_s.append(own_s)
            waited_s.append(lost_s)
        writer.wait()
    writer.close()
    step_s = statistics.median(plain_s)
    slower_s = max(0.0, statistics.median(beside_s) - step_s)
    base_share_s = sum(base_s) / (BASE_EVERY * every)  # the base and the choice, once in a hundred increments
    return [
        Figure(
            name=f"25 M parameters, increment every {every}: loop time lost",
            value=(statistics.mean(waited_s) + slower_s + base_share_s) / step_s,
            unit="of a step",
            bar=bar,
            samples=[round(one / step_s, 4) for one in waited_s],
        ),
        Figure(name="  of that, waiting for copies", value=statistics.mean(waited_s) / step_s, unit="of a step"),
        Figure(name="  a step", value=step_s, unit="s"),
    ]


def _step(world: World, writer: ProcessWriter, *, due: bool) -> tuple[float, float]:
    """A step, and an increment if it is due: seconds of its own work, and of what it waits for checkpoints."""
    noted_s = world.noted_s
    own_s = _timed(world.move) - (world.noted_s - noted_s)
    started_s = time.perf_counter()
    writer.collect()
    if due and writer.idle():
        world.begin(writer)
    return own_s, time.perf_counter() - started_s + world.noted_s - noted_s


def _lost(world: World, writer: ProcessWriter) -> float:
    copy_s = _timed(lambda: world.begin(writer))
    report = writer.wait()
    assert report is not None
    assert report.error is None, report.error
    return copy_s


def sizes(here: Path) -> list[Figure]:
    """How many times smaller an increment of one step is than the state."""
    figures = []
    for name, options in SIZES.items():
        world = World(10, 256, 8, **options)
        writer = world.writer(here / name.replace(" ", "-"), BASE_EVERY)
        for _ in range(20):
            world.move()
        world.written(writer)
        found = []
        for _ in range(4):
            world.move()
            found.append(world.state_bytes() / world.written(writer).stored_bytes)
        writer.close()
        figures.append(from_samples(f"state over increment of a step, {name}", found, "x", bar=BARS[name]))
    return figures


def restores(here: Path, rounds: int) -> list[Figure]:
    """A base and ten increments, over a plain read of the base: in turns, all files in the page cache.

    The plain read is one thread's into memory of its own, as any reader's: most of it is the kernel's giving that memory.
    """
    world = World(8, 512, 1)
    directory = here / "restored"
    writer = world.writer(directory, BASE_EVERY)
    for number in range(11):
        world.move(compute=number < 3)
        world.written(writer)
    writer.close()
    base = min(directory.glob("data-step-*.bin"))
    again = World(8, 512, 1)
    read_s: list[float] = []
    taken_s: list[float] = []
    for _ in range(rounds + 1):
        read_s.append(_timed(base.read_bytes))
        taken_s.append(_timed(lambda: again.restore(directory)))
    for name, tensor in again.tensors().items():
        assert torch.equal(tensor, world.tensors()[name]), name
    return [
        from_samples(
            "restore of a base (25 M parameters) and 10 increments",
            taken_s[1:],  # the first ones read from the disk
            "s",
            bar="<= 2x",
            floor=statistics.median(read_s[1:]),
            floor_name="a plain read of the base",
        )
    ]


def encrypted(here: Path, parameters: int, rounds: int) -> list[Figure]:
    """Encrypted bases and their restore, over those without a key: in turns, in the same run."""
    rows = 1000
    tensors = {f"optim.{name}": torch.randn(rows, parameters // rows) * 1e-3 for name in ("w", "m", "v")}
    size_mb = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    keys = {"plain": None, "encrypted": CheckpointKey(os.urandom(32))}
    claims = {name: claim(here / name, NO_JOB, time.time()) for name in keys}
    policy = RetentionPolicy(keep=1)
    writers = {name: ProcessWriter(claims[name], None, 1, policy, key=key) for name, key in keys.items()}
    for writer in writers.values():
        writer.prepare(tensors)
    written_s: dict[str, list[float]] = {name: [] for name in keys}
    restored_s: dict[str, list[float]] = {name: [] for name in keys}
    for step in range(1, rounds + 2):
        for name, writer in writers.items():
            written_s[name].append(_timed(lambda: _written(writer, tensors, step)))  # noqa: B023
            restored_s[name].append(_timed(lambda: restore_newest(here / name, None, print, key=keys[name])))  # noqa: B023
    for writer in writers.values():
        writer.close()
    figures = []
    for what, found in (("a base until it is durable", written_s), ("its restore", restored_s)):
        ratios = [one / other for one, other in zip(found["encrypted"][1:], found["plain"][1:], strict=True)]
        figures.append(from_samples(f"{what} ({size_mb:.0f} MB), encrypted over plain", ratios, "x"))
        figures += [Figure(name=f"  {name}", value=statistics.median(found[name][1:]), unit="s") for name in keys]
    return figures


def _written(writer: ProcessWriter, tensors: dict[str, torch.Tensor], step: int) -> None:
    writer.begin(tensors, facts(step))
    report = writer.wait()
    assert report is not None
    assert report.error is None, report.error


def _torch_save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with path.open("wb") as stream:
        torch.save(tensors, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _timed(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
