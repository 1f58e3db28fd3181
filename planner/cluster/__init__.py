"""The machines: the capabilities of a device, and the capacity of the links between devices."""
