"""Multi-step decoding on a CPU in C++, on the tensors that torch holds.

`library.py` fills the structures of `types.h`; `decoder.cpp` runs the steps; `build.py` compiles the library.
"""
