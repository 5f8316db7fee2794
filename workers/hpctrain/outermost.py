"""The outermost edge of a rank: an error ends all ranks at once, and its reason is printed first.

Without this the others would wait in a collective for a rank that is gone.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.comm import Communicator
from hpctrain.errors import EXIT_FAILED, TrainError


@contextmanager
def all_or_none(comm: Communicator) -> Iterator[None]:
    """This will run the body and, if it raises, print why with the rank's number and end every rank."""
    try:
        yield
    except KeyboardInterrupt:
        _say(comm, "interrupted\n")
        comm.abort(130)
    except TrainError as error:
        _say(comm, f"{error}\n")
        comm.abort(EXIT_FAILED)
    except Exception:  # whatever it is, the others must not wait for us
        _say(comm, traceback.format_exc())
        comm.abort(EXIT_FAILED)


def _say(comm: Communicator, text: str) -> None:
    sys.stdout.flush()
    label = f"rank {comm.rank} of {comm.size}: " if comm.size > 1 else ""
    sys.stderr.write(f"hpctrain: {label}{text}")
    sys.stderr.flush()
