"""Random numbers that do not depend on the layout: which element of which sample each of them is for."""
