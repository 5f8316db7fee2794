"""The configuration, hpcsched.toml and nodes.d/*.toml: keys, reading and writing."""
