"""What a forward does in Python, outside the graph: kept, or refused with its line."""
