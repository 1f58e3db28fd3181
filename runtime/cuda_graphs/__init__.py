"""Who runs the regions that the plan marks: eagerly, or as CUDA graphs would."""
