"""What a node tells people: event names and logs. Never blocks or fails training."""
