"""Layout search: every layout that fits, its seconds and bytes, and why it is not the best.

Begin at `search`. `space` enumerates layouts, `cuts` prepares one trace for many of them, `best_first` visits by
lower bounds, and `winner` plans the best.
"""
