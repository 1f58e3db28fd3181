"""The type of every value over a mesh axis, and the cheapest typing."""
