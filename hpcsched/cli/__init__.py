"""The commands, one file each.

They start fast: heavy modules are imported only when needed.
"""
