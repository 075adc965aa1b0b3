"""EAGLE heads on disk: EAGLE-1 to EAGLE-3, a file a program or family of programs that reads them."""
