"""Decoding on a CPU in C++: whole runs of steps in one call, on the tensors that torch holds.

`abi.h` is the border: plain structures that `library.py` fills. Behind it `decoder.cpp` goes through a step by the same
five operations a layer as `reference.py`, `team.cpp` spreads their pieces over threads, and the files named after an
instruction set bring the arithmetic. `build.py` compiles it all when d3engine is installed.
"""
