"""The errors that hpcsched raises, classified by the person to act on them.

Every message reads *cannot X: why*, with the values and, if possible, what to do.
"""

from __future__ import annotations


class HpcschedError(Exception):
    """An error whose text is for users: shown without a traceback."""

    by_controller = False  # it is the controller's answer to a command
    at: int | None = None  # index (from 0) of the job concerned, in a request for several jobs


class RequestError(HpcschedError):
    """The request is impossible: the user must change it."""


class UsageError(RequestError):
    """A command line cannot be parsed: exit status 2. `getopt`: getopt_long(3)'s text for it."""

    def __init__(self, text: str, *, getopt: str = "") -> None:
        super().__init__(text)
        self.getopt = getopt


class PermissionDeniedError(RequestError):
    """The user has no permission for this action."""


class NotFoundError(RequestError):
    """The named job, node or partition does not exist."""


class ConfigError(HpcschedError):
    """The admin must change the configuration or the installation."""


class UnavailableError(HpcschedError):
    """Something is temporarily unavailable: try again later."""


class InternalError(HpcschedError):
    """A bug of hpcsched: only this request has failed.

    `reference` finds the traceback in the controller's log.
    """

    def __init__(self, text: str, reference: str = "") -> None:
        super().__init__(text)
        self.reference = reference


class ProtocolError(HpcschedError):
    """The peer violated the protocol: its message is dropped and the connection closed."""


class InvariantError(Exception):
    """The controller's own state is inconsistent: the controller stops."""


def error_of(answer: object) -> HpcschedError:
    """Return the error of an API answer: a JSON object with class ``kind``, text, and ``at``."""
    if not isinstance(answer, dict):
        return ProtocolError("cannot read the controller's answer: it is not a JSON object")
    kind = globals().get(str(answer.get("kind")))
    if not (isinstance(kind, type) and issubclass(kind, HpcschedError)):
        kind = RequestError
    error = kind(str(answer.get("error")))
    error.by_controller = True
    error.at = answer.get("at")
    return error
