"""The messages of controller, agent, shepherds and step commands, and the bounds on what strangers send."""
