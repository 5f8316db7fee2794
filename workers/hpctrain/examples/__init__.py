"""Examples, each started with `python -m hpctrain.examples.NAME --help`."""
