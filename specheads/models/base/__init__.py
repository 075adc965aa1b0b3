"""The base model: loading, quantisation, adapters, and the fingerprint by which a head recognises its base."""
