"""Messages between ranks in one microbatch, each with its axis and its bytes."""
