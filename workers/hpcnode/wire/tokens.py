"""The token of a launch: ``incarnation.job.attempt.step.node.nonce``.

A node that left an attempt and was given to it again is in another stay of the attempt, written behind it: ``2-1``. The
controller's counterpart is `hpcsched.model.ids.Token`; both accept the same texts.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional, Tuple

Life = Tuple[int, int]  # (attempt, stay); they end in this order on a node

_TOKEN = re.compile(
    r"([0-9a-f]{8,32})\.(\d{1,18})\.(\d{1,9})(?:-([1-9]\d{0,8}))?\.(batch|alloc|\d{1,9})\.([A-Za-z0-9][A-Za-z0-9_-]{0,62})\.([0-9a-f]{32})\Z"
)


class Token(NamedTuple):
    """One launch of one step of one attempt on one node."""

    incarnation: str
    job_id: int
    attempt: int
    step: str
    node: str
    nonce: str
    stay: int = 0

    @property
    def job(self) -> Tuple[str, int]:
        """The job, without its attempt."""
        return self.incarnation, self.job_id

    @property
    def life(self) -> Life:
        """The attempt, and the stay of this node in it."""
        return self.attempt, self.stay


def read_token(text: str) -> Optional[Token]:
    """Return the token in `text`, None if it is not a token.

    Then it must not become a file name.
    """
    match = _TOKEN.match(text)
    if match is None:
        return None
    incarnation, job, attempt, stay, step, node, nonce = match.groups()
    return Token(incarnation, int(job), int(attempt), step, node, nonce, int(stay or 0))
