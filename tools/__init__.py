"""Tools for those who work on this project. They are not part of what is installed."""
