"""The user's own module, in eager mode, beside a run."""
