"""Files that commands of the lab read."""
