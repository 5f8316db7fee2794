"""Launching, simulated: one integer seed decides everything, and every fault of the launch protocol happens.

What is real: the controller's tick, lifecycle, planner, step service and store (SQLite in memory), the node's ledger, spool,
log of what is over, and search for what a lost step left behind. What is simulated, each in a module of its own:

    agenda     the clock, and what is to happen next
    points     the named points at which a process can be killed
    disk       a node's disk: what was not fsynced may go at a power failure; it can be full
    machine    a node: power, boots, processes (with pids that come round again), its disk
    shepherds  the shepherd, step by step as `hpcnode.shepherd.shepherd` does it, and the agent's connection to it
    agent      the agent around the ledger, as `hpcnode.agent.agent` does it
    wires      connections between controller and agents: cut, doubled, delayed, reordered, cut in half
    head       the controller's process around `Controller`: database, links, restarts
    people     clients that submit and cancel, and ask again when they get no answer
    edits      the configuration edited under running jobs: names that lead elsewhere, nodes that go
    truth      what really ran, and the invariants: looks after every step at what changed
    world      all of it, put together

and what is done with it:

    stories    small stories; every crash point in them is tried with every fault of every message
    cover      in which of them each such pair is tried, and what of it was; goes on where it was stopped
    chaos      random worlds made from a seed, and the search for the shortest history that still fails
    mutants    known ways to break the production code; each has to be noticed

`make sim SEEDS=1000` runs seeds, `make sim SEED=7` one of them in words, `make sim STORIES=1` the stories.
Sources: the launch protocol; TigerBeetle's and FoundationDB's simulators for the approach.
"""
