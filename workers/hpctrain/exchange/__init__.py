"""Everything between a gradient and the communicator."""
