"""One file per command. `main` finds commands by name, and imports only the requested command."""
