"""All that lies between a gradient and the communicator."""
