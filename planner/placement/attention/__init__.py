"""Where scores are computed, and whether tp divides their heads."""
