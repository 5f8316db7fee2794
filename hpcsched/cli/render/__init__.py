"""How commands write jobs, steps and nodes: columns, records, sentences."""
