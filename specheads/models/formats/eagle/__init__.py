"""EAGLE heads on disk: EAGLE-1 to EAGLE-3, one file per program or group of programs that reads them."""
