"""Captures that were made before: in this process or on disk, found by everything that a capture depends on."""
