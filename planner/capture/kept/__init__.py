"""Cache of captures, in the process and on disk; the key covers everything that a capture depends on."""
