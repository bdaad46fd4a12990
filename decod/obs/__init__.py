"""A node's messages to people: event names and logs. They never block or fail training."""
