"""Where an option may be given, and which place wins: command line > environment > lines of the script.

In the environment, ``HSUB_x`` wins over ``SBATCH_x``. An option in a higher layer replaces the values of lower layers, and
options that exclude it (``--mem`` on the command line removes ``--mem-per-cpu`` of the script). Only mail types add up.
Source: sbatch(1), "INPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcsched.errors import RequestError
from hpcsched.jobscript.options import ScriptOption, by_name, by_variable
from hpcsched.jobscript.scan import Settings, put
from hpcsched.jobscript.values import parse_yes_no, short
from hpcsched.model.text import whole_number

PREFIXES = ("SBATCH_", "HSUB_")  # a later one wins
_EXCLUSIVE = (("mem", "mem-per-cpu", "mem-per-gpu"),)
_ADDS_UP = frozenset({"mail-type"})


def environment_options(environ: Mapping[str, str]) -> Settings:
    """Return the options that ``SBATCH_*`` and ``HSUB_*`` variables give. Raises RequestError naming the variable.

    An empty variable is as good as none for an option that needs a value.
    """
    layers = [_with_prefix(prefix, environ) for prefix in PREFIXES]
    return merge_layers(*layers)


def _with_prefix(prefix: str, environ: Mapping[str, str]) -> Settings:
    settings: Settings = {}
    for variable, option in by_variable().items():
        value = environ.get(prefix + variable)
        if value is None or (not value and option.bare is None):
            continue
        try:
            _put_variable(settings, option, value)
        except RequestError as error:
            raise RequestError(f"cannot use {prefix}{variable}={short(value)}: {error}") from None
    return settings


def _put_variable(settings: Settings, option: ScriptOption, value: str) -> None:
    if option.takes_value or option.name == "verbose":
        for _ in range(min(whole_number(value), 9) if option.name == "verbose" and value.isdigit() else 1):
            put(settings, option, value)
    elif option.name in ("requeue", "no-requeue") or parse_yes_no(value):  # for these two, to be set is enough
        put(settings, option, "")


def merge_layers(*layers: Mapping[str, Sequence[str]]) -> Settings:
    """Return the options of all `layers`, the lowest first. Raises RequestError if one layer contradicts itself."""
    merged: Settings = {}
    for layer in layers:
        for group in _EXCLUSIVE:
            _clear_group(group, layer, merged)
        for name, values in layer.items():
            before = merged.pop(name, [])
            merged[name] = [*before, *values] if name in _ADDS_UP else list(values)
    return merged


def _clear_group(group: Sequence[str], layer: Mapping[str, Sequence[str]], merged: Settings) -> None:
    given = [name for name in group if name in layer]
    if len(given) > 1:
        both = " and ".join(f"--{name}" for name in given)
        raise RequestError(f"cannot take both {both}: they exclude each other")
    if given:
        for name in group:
            merged.pop(name, None)


def last(options: Mapping[str, Sequence[str]], name: str) -> str | None:
    """Return the value that counts of an option, None if it was not given."""
    values = options.get(name)
    return values[-1] if values else None


def is_set(options: Mapping[str, Sequence[str]], name: str) -> bool:
    """Say whether a flag is on."""
    value = last(options, name)
    return value is not None and bool(by_name()[name].parse(value))
