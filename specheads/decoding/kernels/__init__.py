"""Our own code for few rows on a CPU, in C++."""
