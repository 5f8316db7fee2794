"""What jobs may have: limits of accounts, users, QOS and partitions, resources by name, licences."""
