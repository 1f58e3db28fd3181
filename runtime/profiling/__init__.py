"""The actions and times of every rank, beside the planned ones, in one trace."""
