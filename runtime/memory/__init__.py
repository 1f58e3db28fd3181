"""What a rank really holds, beside what the plan says."""
