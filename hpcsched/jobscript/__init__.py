"""Job scripts: ``#HSUB`` and ``#SBATCH`` lines, options and the environment to a `JobSpec`; file-name patterns.

`options` has the one table of options; `scan` reads them from words, `script` from the lines of a script, `layers` from
variables, and says which place wins; `build` makes the specification; `check` refuses what no cluster could run (and is
what the controller asks again: what a client sends is only a claim); `values`, `dependency` and `export` read single
values; `patterns` fills ``%j``.

Nothing here knows the cluster, the disk or the clock.
"""
