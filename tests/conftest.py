"""What every test can use, and how Hypothesis behaves in all of them."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from hpcsched.loopback.cluster import FOREIGN_VARIABLES

sys.path.insert(0, str(Path(__file__).parent))

# Hundreds of commands are started: compiling all they import each time takes longer than running them.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A developer's machine may have a cluster, and the suite may run in one of its jobs: the tests' clusters are their own.
_OURS = tuple(f"HPCSCHED_{name}" for name in ("TEST_", "COMPAT", "RECORD", "TRACES", "UPDATE"))
for _name in [name for name in os.environ if name.startswith(FOREIGN_VARIABLES) and not name.startswith(_OURS)]:
    del os.environ[_name]

# A developer may lack a package, and its tests are skipped; continuous integration lacks none.
if os.environ.get("CI"):
    pytest.importorskip = lambda modname, *_args, **_kwargs: importlib.import_module(modname)

# Many tests have unix sockets in directories of their own, and a socket's path has 107 bytes at most (unix(7)): where TMPDIR is
# long, the tests' is the short one.
if len(tempfile.gettempdir()) > 30:
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"

# The same examples in every run, however slow the machine: a run judges a change, not luck. --hypothesis-profile=default
# looks for examples that nobody has seen.
settings.register_profile("suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# Files that take longest, by their seconds on two processors, which each run prints at its end. `make test` gives whole files
# to its workers, and one that begins last would leave the others with nothing to do. Those that wait and those that compute
# take turns.
LONGEST = (
    "attacks/test_as_plain_user.py",
    "integration/test_doctor.py",
    "e2e/test_demo.py",
    "train/test_train_guide.py",
    "integration/test_kill_controller.py",
    "integration/test_edited_cluster.py",
    "simulation/test_stories.py",
    "train/test_train_elastic.py",
    "integration/test_kill_rounds.py",
    "train/test_train_gradlog.py",
    "integration/test_agent.py",
    "e2e/test_elastic_job.py",
    "attacks/test_confinement.py",
    "train/test_train_elastic_rounds.py",
    "attacks/test_gateway.py",
    "train/test_train_comm.py",
    "integration/test_disk_spool.py",
    "train/test_train_resume.py",
    "integration/test_ssh_link.py",
    "train/test_train_links.py",
    "integration/test_disk_cluster.py",
    "train/test_train_zero.py",
    "integration/test_agent_crash.py",
    "e2e/test_training.py",
    "e2e/test_leases.py",
    "train/test_train_choices.py",
    "integration/test_agent_lease.py",
    "train/test_train_replicas.py",
    "integration/test_agent_suspend.py",
    "train/test_train_checkpoint_anywhere.py",
    "integration/test_disk_database.py",
    "train/test_train_leaving.py",
    "integration/test_restore.py",
    "train/test_train_course.py",
    "integration/test_attach.py",
    "train/test_train_reporter.py",
    "attacks/test_fresh_lab.py",
    "train/test_train_examples.py",
    "integration/test_agent_kill.py",
    "train/test_train_parts.py",
    "attacks/test_fuzz.py",
    "simulation/test_mutants.py",
    "attacks/test_hostile_accounts.py",
    "unit/sim/test_sim_policies.py",
    "attacks/test_secrets.py",
    "integration/test_hhealth.py",
    "integration/test_agent_streams.py",
    "attacks/test_roles.py",
    "unit/hpctrain/test_train_tcp_ring.py",
    "integration/test_kill_agent.py",
    "attacks/test_launch_key.py",
    "unit/sched/test_sched_traces.py",
    "compat/test_python_clients.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first, in the order above."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


# ----- where the time goes

LONG_S = 20.0
MOST_SHOWN = 60


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the seconds of the files that took longest, most first: what `LONGEST` is made of."""
    took: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took[report.nodeid.partition("::")[0]] += report.duration
    shown = [f"{taken_s:6.0f} {name}" for name, taken_s in took.most_common(MOST_SHOWN) if taken_s >= LONG_S]
    if shown:
        terminalreporter.section(f"seconds of files, of {sum(took.values()):.0f} in all")
        terminalreporter.write_line("\n".join(shown))
