"""What a node tells people: event names, logs, metrics. Never blocks or fails training."""
