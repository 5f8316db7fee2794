"""Rounds of killing: `python -m tests.integration.kill_rounds --rounds 300 --seed 1`.

In each round the controller, an agent, a shepherd or a whole node is killed at a random moment while jobs flow. In the
end everything is let run out, and what was promised is held against what happened.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from killable import PATIENCE_S, Flow, KillableCluster  # noqa: E402
from waiting import wait_until  # noqa: E402

KINDS = ("controller",) * 7 + ("agent",) * 5 + ("shepherd",) * 5 + ("power",) * 3


def kill_rounds(cluster: KillableCluster, rounds: int, rng: random.Random) -> Counter[str]:
    """Kill something in each of `rounds` rounds while jobs flow, let all jobs end, and return what was killed."""
    assert cluster.machines is not None
    names = sorted(cluster.machines.nodes)
    killed: Counter[str] = Counter()
    pick = random.Random(rng.random())  # of its own, so that what is killed depends on the seed alone
    with Flow(cluster, random.Random(rng.random())) as flow:
        for _ in range(rounds):
            time.sleep(rng.uniform(0.05, 0.6))  # a moment in the life of the jobs, not a wait for anything
            kind = rng.choice(KINDS)
            node = rng.choice(names)
            if kind == "controller":
                cluster.kill_controller()
                cluster.up()
            elif kind == "power":
                cluster.cycle_power(node)
            else:
                kill = cluster.kill_agent if kind == "agent" else partial(cluster.kill_shepherd, rng=pick)
                wait_until(lambda kill=kill, node=node: flow.check() or kill(node), PATIENCE_S, f"a {kind} on {node}")
            killed[kind] += 1
    cluster.kill_controller()  # its next life has forgotten for how long it was going to wait for the nodes
    cluster.up()
    cluster.wait_for_nodes(PATIENCE_S)
    cluster.wait_until_ended(PATIENCE_S)
    return killed


def main() -> int:
    """Run the rounds that the command line asks for; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave the cluster's directory")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="hpc"))
    base.chmod(0o755)
    started_s = time.monotonic()
    with KillableCluster(base) as cluster:
        killed = kill_rounds(cluster, options.rounds, random.Random(options.seed))
        found = cluster.violations()
        wait_until(lambda: not cluster.leftovers(), PATIENCE_S, "the nodes to be empty")
        states = Counter(job["state"] for job in cluster.api("GET", "/v1/history", None)["jobs"])
    print(f"{options.rounds} rounds with seed {options.seed} in {time.monotonic() - started_s:.0f} s")
    print("killed:", ", ".join(f"{n} x {what}" for what, n in killed.most_common()))
    print(f"jobs: {len(cluster.accepted.ids)} acknowledged,", ", ".join(f"{n} {s}" for s, n in states.most_common()))
    print(f"runs: {sum(cluster.ran().values())}, doubled: {sum(n > 1 for n in cluster.ran().values())}")
    print(f"violations: {len(found)}")
    for text in found[:20]:
        print(" ", text)
    if options.keep or found:
        print(f"kept: {base}")
    else:
        cluster.remove()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
