"""hsub, hqueue, hcancel and their Slurm names: they turn words into API requests and text.

`submit`, `queue` and `cancel` contain the commands. `call` describes the caller. `options` parses words for all commands.
`slurm` is shared by the commands with Slurm's names. The controller runs them for thin clients (`hpcsched.api.command`), and
the command's own process runs them (`hpcsched.cli.process`).
"""
