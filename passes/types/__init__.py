"""The types of a value over a mesh axis, and the collectives between them."""
