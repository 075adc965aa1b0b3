"""The base model: loading, quantization, adapters, and the fingerprint by which a head knows its base."""
