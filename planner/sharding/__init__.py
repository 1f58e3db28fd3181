"""What each rank holds, sums and exchanges: decided once, read by all."""
