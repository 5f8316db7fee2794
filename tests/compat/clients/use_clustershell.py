"""ClusterShell: its own group sources for Slurm, as it ships them: partitions, states, jobs, users."""

import configparser
import getpass
import sys
from pathlib import Path

from ClusterShell.NodeUtils import GroupResolver, UpcallGroupSource

(example,) = Path(sys.prefix).glob("etc/clustershell/groups.conf.d/slurm.conf.example")
config = configparser.RawConfigParser()
config.read(example)


def source(section):
    upcalls = {
        f"{name}": config.get(section, name)
        for name in ("map", "all", "list", "reverse")
        if config.has_option(section, name)
    }
    return UpcallGroupSource(
        section,
        map_upcall=upcalls["map"],
        all_upcall=upcalls.get("all"),
        list_upcall=upcalls.get("list"),
        reverse_upcall=upcalls.get("reverse"),
        cache_time=0,
    )


resolver = GroupResolver(source(next(name for name in config.sections() if name.startswith("slurmpart"))))
assert resolver.grouplist() == ["main"]
assert resolver.group_nodes("main") == ["n[1-3]"]
assert resolver.node_groups("n2") == ["main"]
states = GroupResolver(source(next(name for name in config.sections() if name.startswith("slurmstate"))))
assert set(states.grouplist()) == {"mixed", "idle"}, states.grouplist()
jobs = GroupResolver(source(next(name for name in config.sections() if name.startswith("slurmjob"))))
assert jobs.group_nodes(sys.argv[1]) == [sys.argv[2]]
users = GroupResolver(source(next(name for name in config.sections() if name.startswith("slurmuser"))))
assert users.group_nodes(getpass.getuser()) == [sys.argv[2]]
print("well done")
