"""Linux: processes, accounts, cgroups, durable files, the event loop."""
