"""The parts of `benchmarks.gpu_round`, one file each; every part fills the dictionary that it is given."""
