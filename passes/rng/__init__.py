"""Layout-invariant RNG: maps each random element to its (sample, element) index."""
