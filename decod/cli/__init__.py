"""The command line. `main` finds commands by name, and imports only the module of one of them."""
