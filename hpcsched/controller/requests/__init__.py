"""Handle the users' requests to the controller, each inside a transaction."""
