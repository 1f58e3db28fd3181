"""Python behaviour of a forward outside the graph: kept, or refused at the source line."""
