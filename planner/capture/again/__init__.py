"""A model captured at one size, at other sizes: recorded without export, as the first graph with other numbers."""
