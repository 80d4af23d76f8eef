"""The repository as a whole: what may import what, what is installed, what the launcher does."""
