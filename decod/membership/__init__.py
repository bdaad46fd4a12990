"""Who may take part in a run, and how a node proves it."""
