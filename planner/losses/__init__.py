"""The loss of a global batch from its microbatches: what adds up, what counts, and what does not."""
