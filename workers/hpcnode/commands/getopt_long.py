"""Read options as getopt_long(3) does, for all commands with Slurm's grammar.

``--name=value``, ``--name value``, ``-N2``, ``-N 2``, letters in clusters (``-HQ``, ``-HN2``). ``--`` ends the options, and so
does the first word that is not an option, unless a command takes options after its operands. Each command has its table and its
messages: it says in a subclass of `OptionReader` how an option is found, and what a wrong one is answered with.

An option has a name, a letter (or none) and a kind. Source: getopt_long(3).
"""

from __future__ import annotations

from collections.abc import Sequence

TYPE_CHECKING = False  # for type checkers; importing typing takes a tenth of a command's start
if TYPE_CHECKING:
    from typing import Any

FLAG, VALUE, OPTIONAL = "flag", "value", "optional"


class SlurmOption:
    """An option in a table.

    `metavar` "" takes no value; `bare` is the value without one, None if a value is required.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...
        @property
        def short(self) -> str: ...
        @property
        def metavar(self) -> str: ...
        @property
        def bare(self) -> str | None: ...

    @property
    def kind(self) -> str:
        """Return whether it takes a value: FLAG, VALUE or OPTIONAL."""
        return FLAG if not self.metavar else VALUE if self.bare is None else OPTIONAL

    @property
    def spelling(self) -> str:
        """Return the option as a help text shows it: ``-N, --nodes=MIN[-MAX]``."""
        value = "=" + self.metavar if self.metavar else ""
        value = "[" + value + "]" if value and self.bare is not None else value
        return ("-" + self.short + ", " if self.short else "") + "--" + self.name + value


class OptionReader:
    """Reads the words of one command line."""

    takes_operands = False  # options may follow operands
    skips_equals = False  # after a letter: -n=4 means -n4

    def find(self, name: str) -> Any:
        """Return the option of a long name, or of its beginning. Raises the command's error."""
        raise NotImplementedError

    def find_letter(self, letter: str) -> Any:
        """Return the option of a letter. Raises the command's error."""
        raise NotImplementedError

    def joins(self, rest: str) -> bool:
        """Return whether the rest of a cluster is the value of a letter whose value is optional."""
        return True

    def take(self, option: Any, value: str | None) -> None:
        """Record an option; `value` is None if it was given without one."""
        raise NotImplementedError

    def takes_none(self, option: Any, value: str) -> Exception:
        """Return the error for a value that a flag was given."""
        raise NotImplementedError

    def needs_value(self, option: Any, spelled: str) -> Exception:
        """Return the error for an option without its value; `spelled` is as it was written."""
        raise NotImplementedError

    def read(self, words: Sequence[str]) -> list[str]:
        """Take the options in `words`, and return the other words."""
        operands: list[str] = []
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if word == "--":
                break
            if word == "-" or not word.startswith("-"):
                if not self.takes_operands:
                    at -= 1
                    break
                operands.append(word)
            elif word.startswith("--"):
                at += self._long(word[2:], words[at : at + 1])
            else:
                at += self._letters(word[1:], words[at : at + 1])
        return [*operands, *words[at:]]

    def _long(self, text: str, following: Sequence[str]) -> int:
        """Take ``name`` or ``name=value``; return how many of the following words it took."""
        name, equals, value = text.partition("=")
        option = self.find(name)
        if equals and option.kind == FLAG:
            raise self.takes_none(option, value)
        if equals or option.kind != VALUE:
            self.take(option, value if equals else None)
            return 0
        return self._following(option, "--" + option.name, following)

    def _letters(self, letters: str, following: Sequence[str]) -> int:
        """Take ``HN2`` of ``-HN2``; return how many of the following words it took."""
        for at, letter in enumerate(letters, 1):
            option = self.find_letter(letter)
            rest = letters[at:]
            if rest and (option.kind == VALUE or (option.kind == OPTIONAL and self.joins(rest))):
                self.take(option, rest[1:] if self.skips_equals and rest.startswith("=") else rest)
                return 0
            if option.kind == VALUE:
                return self._following(option, "-" + letter, following)
            self.take(option, None)
        return 0

    def _following(self, option: Any, spelled: str, following: Sequence[str]) -> int:
        if not following:
            raise self.needs_value(option, spelled)
        self.take(option, following[0])
        return 1
