"""The machines: what a device can do, and what the links between devices carry."""
