"""The outermost layer of a command: turns errors into one line on standard error and an exit status.

Exit statuses: 0 success; 1 failure; 2 usage error; 130 interrupted from the terminal. Knows no command. Rule: a bug keeps its
traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import hpcsched
from hpcsched.commands.options import FAILED as FAILED
from hpcsched.commands.options import Command, Words, explained, header_note, help_text, read_words
from hpcsched.errors import HpcschedError

INTERRUPTED = 130


Explain = Callable[[str, HpcschedError], tuple[str, int]]


def run_command(
    command: Command,
    work: Callable[[Words], int],
    argv: Sequence[str] | None,
    *,
    explain: Explain | None = None,
    version: Callable[[str], None] | None = None,
) -> int:
    """Read the words of `command`, do its work and return its exit status.

    `explain` writes its errors and `version` its version, if they differ from those of our own commands.
    """

    def body(words: Sequence[str]) -> int:
        read = read_words(command, words)
        if read.has("help"):
            sys.stdout.write(help_text(command))
            return 0
        if read.has("version"):
            (version or print_version)(command.name)
            return 0
        if list(words) == ["-h"] and read.has("noheader") and explain is None:
            note(command.name, header_note(command.name))
        return work(read)

    return guarded(command.name, body, argv, explain=explain)


def guarded(
    name: str, body: Callable[[Sequence[str]], int], argv: Sequence[str] | None, *, explain: Explain | None = None
) -> int:
    """Call `body` with the words of the command line.

    Return its status, or the status of its error.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names may have characters that the locale lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        status = body(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except HpcschedError as error:
        text, status = (explain or explained)(name, error)
        print(text, file=sys.stderr)
        return status
    except PermissionError as error:  # a file of the cluster, such as its configuration
        complain(name, f"cannot use {error.filename}: {error.strerror}; only its owner and root may")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone. Flushing the buffer at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def complain(name: str, text: str) -> None:
    """Print an error to standard error."""
    print(f"{name}: error: {text}", file=sys.stderr)


def note(name: str, text: str) -> None:
    """Print a note to standard error if it is a terminal."""
    if sys.stderr.isatty():
        print(f"{name}: {text}", file=sys.stderr)


def print_version(name: str) -> None:
    """Print the version."""
    print(f"{name} (hpcsched) {hpcsched.__version__}")
