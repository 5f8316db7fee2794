"""What people ask of the controller, each request inside a transaction."""
