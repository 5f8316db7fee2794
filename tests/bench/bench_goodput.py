"""What part of the time three ranks and a spare train while one of the ranks is killed every minute: for twenty minutes.

The goodput is the run's own account (`hpctrain.reporter`): seconds of steps that count over all seconds since it began.
"""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

from tests.bench.bench_elastic import running
from tests.bench.figures import Figure, from_samples

EVERY_S = 60.0
# A step takes a tenth of a second: one of a millisecond would show what is told of steps, not what faults cost.
MODEL = "--layers 4 --width 128 --heads 4 --context 64 --batch 48 --checkpoint-every 50 --eval-every 0 --sample 0"


def run(quick: bool = False) -> list[Figure]:
    """Return the goodput, and what it was made less by."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        last = train(out, 150.0 if quick else 1200.0)
    return figures(last)


def train(out: Path, for_s: float) -> dict:
    """Train in `out`, going on from what is there, and kill a rank every minute; return the last line of the metrics."""
    with running(out, MODEL) as elastic:
        elastic.wait_for_start()
        began_s = time.monotonic()
        for minute in range(1, int(for_s / EVERY_S) + 1):
            time.sleep(max(0.0, began_s + minute * EVERY_S - EVERY_S / 2 - time.monotonic()))
            elastic.hit(signal.SIGKILL)
        time.sleep(max(0.0, began_s + for_s - time.monotonic()))
        return elastic.lines()[-1]


def figures(last: dict) -> list[Figure]:
    """Return what the last line of the metrics says."""
    title = f"goodput with a kill a minute, {last['interruptions']} kills in {last['time'] - last['began_at_s']:.0f} s"
    return [
        from_samples(title, [100 * last["goodput"]], "%", bar=">= 95"),
        from_samples("... steps that were lost", [float(last["lost_steps"])], "", bar="0"),
    ]
