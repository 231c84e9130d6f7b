"""Step options: what a training step may do besides the plain one. One file for each."""
