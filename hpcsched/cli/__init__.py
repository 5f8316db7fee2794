"""The commands: one file each. They start fast: nothing heavy is imported before it is needed."""
