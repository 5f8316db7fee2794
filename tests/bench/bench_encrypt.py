"""Encrypted connections between ranks over plain ones: sums in the ring, and steps of an elastic run.

Sums: two processes with a plain ring and an encrypted one over TCP on this host, in turns in one run. Steps: elastic runs of two
ranks, one after another with and without HPCTRAIN_ENCRYPT=1; a figure is the median over the rounds of the ratio in a round.
On one host the cipher shares the cores with the ranks, and loopback is faster than any network: this is the worst case.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from hpctrain.comm.tcp_ring import TcpRing
from hpctrain.metrics import read_metrics
from hpctrain.peers import GUEST, HOST, Session, tunnel
from tests.bench.figures import Figure, from_samples

SIZES_MB = (1, 25)
MODEL = "--layers 4 --width 128 --heads 4 --context 64 --batch 8 --checkpoint-every 0 --eval-every 0 --sample 0 --no-save-model"
RANKS = 2


def run(quick: bool = False) -> list[Figure]:
    """Return the ratios, and the times behind them."""
    torch.set_num_threads(1)
    return sums(10 if quick else 40) + steps(2 if quick else 6, 20 if quick else 100)


def sums(rounds: int) -> list[Figure]:
    """Time sums of two ranks, each in a process of its own."""
    pairs = {mode: (_pair(), _pair()) for mode in ("plain", "encrypted")}
    waits, done = os.pipe()
    child = os.fork()  # before there are threads
    rings = {mode: _ring(0 if child else 1, *both, encrypted=mode == "encrypted") for mode, both in pairs.items()}
    figures = []
    for size_mb in SIZES_MB:
        flat = torch.zeros(size_mb * 250_000)
        taken_s: dict[str, list[float]] = {mode: [] for mode in rings}
        for _ in range(rounds + 1):
            for mode, ring in rings.items():
                started_s = time.perf_counter()
                ring.all_reduce(flat)
                taken_s[mode].append(time.perf_counter() - started_s)
        ratios = [sealed / plain for sealed, plain in zip(taken_s["encrypted"][1:], taken_s["plain"][1:], strict=True)]
        figures.append(from_samples(f"a sum of {size_mb} MB, 2 ranks on one host, encrypted over plain", ratios, "x"))
        for mode, found in taken_s.items():
            figures.append(Figure(name=f"  {mode}", value=1e3 * statistics.median(found[1:]), unit="ms"))
    if not child:
        os.close(done)
        os.read(waits, 1)  # what is still being sent must not end with this process
        os._exit(0)
    os.close(done)
    os.waitpid(child, 0)
    return figures


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


def _ring(rank: int, forth: tuple, back: tuple, *, encrypted: bool) -> TcpRing:
    ends = (forth[0], back[1]) if rank == 0 else (back[0], forth[1])
    roles = (GUEST, HOST)
    right, left = (tunnel(end, Session(bytes(32), role, encrypted)) for end, role in zip(ends, roles, strict=True))
    return TcpRing(rank, 2, right, left)


def steps(rounds: int, count: int) -> list[Figure]:
    """Time the steps of elastic runs."""
    taken_s: dict[str, list[float]] = {"0": [], "1": []}
    for number in range(rounds):
        for encrypt in ("01", "10")[number % 2]:
            taken_s[encrypt].append(_step_s(encrypt, count))
    ratios = [sealed / plain for sealed, plain in zip(taken_s["1"], taken_s["0"], strict=True)]
    return [
        from_samples("a step of an elastic run of 2 ranks (0.8 M parameters), encrypted over plain", ratios, "x"),
        Figure(name="  plain", value=1e3 * statistics.median(taken_s["0"]), unit="ms"),
        Figure(name="  encrypted", value=1e3 * statistics.median(taken_s["1"]), unit="ms"),
    ]


def _step_s(encrypt: str, count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        script = [
            sys.executable,
            "-m",
            "hpctrain.examples.chargpt",
            "--out",
            folder,
            "--steps",
            str(count),
            *MODEL.split(),
        ]
        command = [sys.executable, "-m", "hpctrain.elastic", "--ranks", str(RANKS), "--", *script]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "HPCTRAIN_ENCRYPT": encrypt}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        return statistics.median(line["t_step_s"] for line in list(read_metrics(Path(folder, "metrics.jsonl")))[5:])
