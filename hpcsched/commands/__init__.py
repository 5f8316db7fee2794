"""hsub, hqueue, hcancel and their Slurm names: words in, requests to the API and text out.

`submit`, `queue` and `cancel` have the commands, `call` what they know of their caller, `options` the reader of words for all
commands, `slurm` what the commands with Slurm's names have in common. The controller runs them for thin clients
(`hpcsched.api.command`), and the command's own process runs them (`hpcsched.cli.process`).
"""
