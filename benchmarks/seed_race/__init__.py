"""The parts of benchmarks/seeds.py."""
