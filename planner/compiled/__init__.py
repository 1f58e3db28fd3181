"""Which runs of ops between collectives and products become one compiled function, and why others run op by op."""
