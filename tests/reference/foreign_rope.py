"""Scaled rotary positions after their papers, in plain Python: no transformers and no specheads."""

import math

# Of an original length of 64 in heads of 12 values: each changes frequencies, and YaRN cos and sin too.
SCALED = {
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with its options": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
    },
    "yarn with mscale": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale": 2.0, "mscale_all_dim": 0.5,
    },
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}


def frequencies(rope, size):
    """Angles a position, one for each two of `size` values, and the factor of cos and sin."""
    theta, kind, factor = rope["rope_theta"], rope["rope_type"], rope.get("factor")
    plain = [theta ** (-2 * i / size) for i in range(size // 2)]
    if kind == "default":
        return plain, 1.0
    if kind == "linear":  # arXiv:2306.15595
        return [own / factor for own in plain], 1.0
    original = rope["original_max_position_embeddings"]
    turns = [original * own / (2 * math.pi) for own in plain]  # in the original length
    if kind == "llama3":  # as released with Llama 3.1: what turns often stays, what turns seldom is stretched
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = [min(1.0, max(0.0, (number - low) / (high - low))) for number in turns]
        return [own * (k + (1 - k) / factor) for own, k in zip(plain, kept, strict=True)], 1.0
    fast, slow = rope.get("beta_fast", 32), rope.get("beta_slow", 1)  # arXiv:2309.00071
    first, last = (size * math.log(original / (b * 2 * math.pi)) / (2 * math.log(theta)) for b in (fast, slow))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    stretched = [min(1.0, max(0.0, (i - first) / (last - first))) for i in range(size // 2)]
    made = [own * (1 - s + s / factor) for own, s in zip(plain, stretched, strict=True)]

    def warmth(scale):
        return 0.1 * scale * math.log(factor) + 1

    both = warmth(rope.get("mscale", 1)) / (warmth(rope["mscale_all_dim"]) if "mscale_all_dim" in rope else 1)
    return made, rope.get("attention_factor", both)
