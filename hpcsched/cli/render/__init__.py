"""The output of commands: columns, records, JSON, and the screen of `hpcsched top`."""
