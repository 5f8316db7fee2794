"""What passes between controller, agent, shepherds and step commands, and the gate that reads it."""
