"""Run the benchmarks named on the command line, or all: `python -m tests.bench [--quick] [NAME...]`."""

from __future__ import annotations

import argparse
import compileall
import importlib
import os
from pathlib import Path

from tests.bench.figures import save, table

HERE = Path(__file__).parent


def main() -> None:
    """Run, print a table for each, and write bench-out/NAME.json."""
    known = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    args = parser.parse_args()
    # As pip leaves an installation: a command that has to compile its modules each time takes twice as long.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for directory in ("hpcsched", "workers"):
        compileall.compile_dir(HERE.parents[1] / directory, quiet=1)
    for name in args.names or known:
        figures = importlib.import_module(f"tests.bench.bench_{name}").run(args.quick)
        print(f"== {name}\n{table(figures)}\n", flush=True)
        save(figures, Path("bench-out") / f"{name}.json")


if __name__ == "__main__":
    main()
