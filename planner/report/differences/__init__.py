"""Two plans side by side: what came, what went, what is otherwise."""
