"""Linux as the nodes' code uses it: processes, accounts, cgroups, durable files, the event loop."""
