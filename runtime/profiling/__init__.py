"""What every rank did and when, beside what was planned: one trace."""
