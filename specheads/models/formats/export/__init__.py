"""Exporting a head to another program: its files, their README, and GGUF files made by llama.cpp's converter."""
