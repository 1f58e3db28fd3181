"""From what a cut costs, a layout and a cluster: the seconds of a step, and the bytes of a rank."""
