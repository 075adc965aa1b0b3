"""Writing a head for another program: the files, their README, and GGUF files by llama.cpp's converter."""
