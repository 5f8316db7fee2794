"""The errors that hpcsched raises, sorted by who must act.

Every message reads *cannot X: why*, with the values and, where possible, what to do about it.
"""

from __future__ import annotations


class HpcschedError(Exception):
    """An error whose text is meant for a person: shown without a traceback."""

    by_controller = False  # it was the controller's answer to a command
    at: int | None = None  # of a request for several jobs: which of them it is about, from 0


class RequestError(HpcschedError):
    """The user asked for something that cannot be: change the request."""


class UsageError(RequestError):
    """The words of a command line cannot be understood: exit status 2. `getopt`: the same in getopt_long(3)'s words."""

    def __init__(self, text: str, *, getopt: str = "") -> None:
        super().__init__(text)
        self.getopt = getopt


class PermissionDeniedError(RequestError):
    """The user may not do this to that object."""


class NotFoundError(RequestError):
    """The named job, node or partition does not exist."""


class ConfigError(HpcschedError):
    """The administrator must change the configuration or the installation."""


class UnavailableError(HpcschedError):
    """Something is not there at the moment: try again later."""


class InternalError(HpcschedError):
    """A bug of hpcsched: only what was asked for has failed. `reference` finds the traceback in the controller's log."""

    def __init__(self, text: str, reference: str = "") -> None:
        super().__init__(text)
        self.reference = reference


class ProtocolError(HpcschedError):
    """The peer broke the protocol: its message is dropped and the connection closed."""


class InvariantError(Exception):
    """Our own ledger is wrong. The controller stops: it does not go on with it."""


def error_of(answer: object) -> HpcschedError:
    """Return the error that the API answered: a JSON object with the class as ``kind``, the text, and ``at``."""
    if not isinstance(answer, dict):
        return ProtocolError("cannot read the controller's answer: it is not a JSON object")
    kind = globals().get(str(answer.get("kind")))
    if not (isinstance(kind, type) and issubclass(kind, HpcschedError)):
        kind = RequestError
    error = kind(str(answer.get("error")))
    error.by_controller = True
    error.at = answer.get("at")
    return error
