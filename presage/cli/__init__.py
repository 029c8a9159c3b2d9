"""The command-line interface: one file a command."""
