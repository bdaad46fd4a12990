"""One file per command. `main` finds them by name and imports only the one that is asked for."""
