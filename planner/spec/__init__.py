"""One YAML file becomes one frozen Spec."""
