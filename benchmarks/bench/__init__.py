"""What the benchmarks are made of; the commands are `run.py` and `run_peers.py` beside this package."""
