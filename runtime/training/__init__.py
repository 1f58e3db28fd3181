"""The run of a command: what was asked for, its loop, its saves, and what it goes on from."""
