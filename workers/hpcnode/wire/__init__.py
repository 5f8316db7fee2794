"""The messages of controller, agent, shepherds and step commands, and their bounds."""
