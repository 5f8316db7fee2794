"""Small traces for tests, hand-made or drawn."""

from __future__ import annotations

from hypothesis import strategies as st

from hpcsched.sim.swf import TraceJob

PROCS = 10

# Ten processors. Job 1 has six until 100 (it ends at 60), job 2 needs eight and is the head, promised 100 with two extra.
# 3 is short and would end by 100; 4 is long and takes the two extra; 5 fits but is neither short nor small enough.
SMALL = """\
; MaxProcs: 10
1 0 -1 60 6 -1 -1 6 100 -1 1 1 -1 -1 -1 -1 -1 -1
2 1 -1 50 8 -1 -1 8 50 -1 1 2 -1 -1 -1 -1 -1 -1
3 2 -1 20 2 -1 -1 2 90 -1 1 1 -1 -1 -1 -1 -1 -1
4 3 -1 300 2 -1 -1 2 300 -1 1 2 -1 -1 -1 -1 -1 -1
5 4 -1 10 3 -1 -1 3 200 -1 1 1 -1 -1 -1 -1 -1 -1
"""


def job(number: int, submit_s: float, run_s: float, procs: int, asked_s: float = 0, user: int = 1) -> TraceJob:
    return TraceJob(number, submit_s, run_s, procs, max(asked_s, run_s), user)


@st.composite
def traces(draw: st.DrawFn, most: int = 25, asks: tuple[float, ...] = ()) -> list[TraceJob]:
    """Draw jobs of a pool of PROCS processors, many at the same second and with equal requests."""
    at_s = 0
    jobs = []
    for number in range(draw(st.integers(1, most))):
        at_s += draw(st.sampled_from([0, 0, 1, 3, 10]))
        asked_s = draw(st.sampled_from([*asks, 1, 5, 10, 20, 60]))
        run_s = draw(st.integers(0, int(asked_s)))
        jobs.append(job(number, at_s, run_s, draw(st.integers(1, PROCS)), asked_s, draw(st.integers(-1, 2))))
    return jobs
