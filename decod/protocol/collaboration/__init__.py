"""The core of a collaborative run: peers with their own training loops average in rounds."""
