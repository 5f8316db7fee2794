"""Job scripts: ``#HSUB`` and ``#SBATCH`` lines, options and the environment to a `JobSpec`; file-name patterns.

`options` has the one table of options; `scan` reads them from the command line, `script` from the lines of a script, `layers`
from variables, and decides which place wins; `build` makes the specification; `check` rejects what no cluster could run, also
in the controller, because a client may send anything; `values`, `dependency` and `export` parse single values;
`patterns` fills ``%j``.

Nothing here knows the cluster, the disk or the clock.
"""
