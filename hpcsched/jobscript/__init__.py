"""Read job scripts: ``#HSUB`` and ``#SBATCH`` lines, options and environment.

`options` has the one table of options, reads them from words and variables, and decides which place wins; `script` reads the
lines of a script; `build` makes a `JobSpec` of them and checks it, also in the controller, because a client may send anything;
`values` parses single values; `patterns` fills ``%j`` in names of files.

Nothing here knows the cluster, the disk or the clock.
"""
