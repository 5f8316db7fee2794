"""Job scripts: ``#HSUB`` and ``#SBATCH`` lines, options and the environment to a `JobSpec`; file-name patterns.

`options` has the one table of options, reads them from words and variables, and decides which place wins; `script` reads the
lines of a script, `pbs` those of other schedulers; `build` makes the specification; `check` rejects what no cluster could run,
also in the controller, because a client may send anything; `values` parses single values; `patterns` fills ``%j``.

Nothing here knows the cluster, the disk or the clock.
"""
