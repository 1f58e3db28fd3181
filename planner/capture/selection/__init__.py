"""Data-dependent row selection (`x[mask]` … `index_add`), rewritten as a dense computation with a mask."""
