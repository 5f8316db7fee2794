"""An elastic run whose ranks are forked from a process that has torch already, so that hundreds of small ones take minutes.

It is the real run (`hpctrain.elastic`'s roster, its keeping of slots, members, the loop), whose processes are started otherwise.
A rank is killed as it begins its N-th sum, whatever that is for: so every place where ranks need each other can be tried.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import thread_writer
import torch
import torch.nn.functional as F

from hpctrain.comm.elastic_group import ElasticCommunicator
from hpctrain.elastic.__main__ import ElasticRun, parse
from hpctrain.elastic.launch import RankLauncher, RankSlot
from hpctrain.optim.adamw import AdamW
from hpctrain.options import add_options
from hpctrain.run import start

LAST_DESCRIPTOR = 1024
Faults = Mapping[int, int]  # of slots: in which sum their first process is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has come to: its exit status, and what was printed."""

    status: int
    output: str


def run(out: Path, log: Path, *words: str, ranks: int = 3, faults: Faults | None = None, least: int = 1) -> Outcome:
    """Make one run, in a process of its own, of the script below; `log` gets what it prints."""
    pid = os.fork()
    if pid == 0:
        _print_to(log)
        launch = parse(["--ranks", str(ranks), "--least", str(least), "--", "script"])
        _exit_with(lambda: asyncio.run(_run(launch, ["--out", str(out), *words], faults or {})))
    _, status = os.waitpid(pid, 0)
    return Outcome(status=os.waitstatus_to_exitcode(status), output=log.read_text())


async def _run(launch: argparse.Namespace, words: list[str], faults: Faults) -> int:
    elastic = ElasticRun(launch, {})
    elastic._launcher = Forking(words, faults)
    return await elastic.run()


class Forking(RankLauncher):
    """Starts processes by fork; each of `faults` is the first one's in its slot."""

    def __init__(self, words: list[str], faults: Faults) -> None:
        super().__init__(["script"], {})
        self._words, self._faults = words, dict(faults)

    async def start(self, slot: RankSlot, facts: Mapping[str, str]) -> None:
        fault = self._faults.pop(slot.number, 0)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            os.closerange(3, LAST_DESCRIPTOR)  # a connection ends when the one process that has it does
            if fault:
                _die_in_sum(fault)
            _exit_with(lambda: script(self._words, facts))
        self.processes[slot.number] = _Process(pid)  # type: ignore[assignment]


class _Process:
    """What the run needs of asyncio's."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._end)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


def _print_to(log: Path) -> None:
    with log.open("w") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)


def _exit_with(act: Callable[[], int]) -> None:
    status = 70
    with suppress(BaseException):
        try:
            status = act()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _die_in_sum(number: int) -> None:
    real, left = ElasticCommunicator.begin, [number]

    def begin(self: ElasticCommunicator, *arguments: object, **options: object):  # noqa: ANN202
        if self.size > 1:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments, **options)

    ElasticCommunicator.begin = begin


class Net(torch.nn.Module):
    """A model with a buffer: how many forward passes it has trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 16), torch.nn.Linear(16, 3)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
        return self.last(torch.tanh(self.first(inputs)))


def script(words: list[str], facts: Mapping[str, str]) -> int:
    """What each rank runs; its last line has the number of forward passes."""
    parser = argparse.ArgumentParser()
    add_options(
        parser,
        schedule="cosine",
        clip=1.0,
        batch=12,
        steps=8,
        warmup=2,
        checkpoint_every=2,
        eval_every=3,
        print_every=1,
        lr=1e-2,
    )
    thread_writer.install()
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    with start(options, "forked", facts) as here:
        model = Net()
        inputs = torch.randn(1000, 6, generator=torch.Generator().manual_seed(0))
        names = (inputs[:, :3].abs()).argmax(dim=1)

        def validation(part: int, parts: int) -> tuple[float, int]:
            mine = slice(part, 300, parts)
            return float(F.cross_entropy(model(inputs[mine]), names[mine], reduction="sum")), len(names[mine])

        for batch in here.steps(model, AdamW(model.named_parameters()), validation):
            batch.backward(F.cross_entropy(model(inputs[batch.low : batch.high]), names[batch.low : batch.high]))
        if here.is_first:
            print(f"forwards {int(model.forwards)}")
    return here.status
