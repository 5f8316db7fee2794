"""The configuration: hpcsched.toml and nodes.d/*.toml, their keys, reading and writing."""
