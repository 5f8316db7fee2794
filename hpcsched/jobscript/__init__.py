"""Job scripts: ``#HSUB`` and ``#SBATCH`` lines, options and the environment to a `JobSpec`; file-name patterns.

`options` has the one table of options; `scan` reads them from words; `script` finds the lines in a script; `build` puts
the layers together and makes the specification; `check` refuses what no cluster could run (and is what the controller
asks again: what a client sends is only a claim); `values` and `export` read single values; `patterns` fills ``%j``.

Nothing here knows the cluster, the disk or the clock, and nothing imports more than the standard library: `hsub` starts
with it.
"""
