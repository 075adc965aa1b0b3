"""An MTP module as its family's papers and servers have it, one vector at a time, from the tensors of a file."""

import math

import torch
import torch.nn.functional as F

from tests.reference.slow_heads import rms_norm
from tests.support.shipped_mtp import names_of


def rotated(x, position, theta, interleaved):
    """RoPE of one head's vector: in the planes (j, j + d/2), or (2j, 2j + 1)."""
    d, out = len(x), x.clone()
    for j in range(d // 2):
        one, other = (2 * j, 2 * j + 1) if interleaved else (j, j + d // 2)
        angle = position * theta ** (-2 * j / d)
        out[one] = x[one] * math.cos(angle) - x[other] * math.sin(angle)
        out[other] = x[one] * math.sin(angle) + x[other] * math.cos(angle)
    return out


def plain_layer(t, entered, config, interleaved=False, window=None):
    """The output of the last of [(position, x)] through a decoder layer of these tensors.

    It has norms on queries and keys, and biases, if there are any."""
    eps, theta, heads = config.rms_norm_eps, config.rope_parameters["rope_theta"], config.num_attention_heads
    shared = heads // config.num_key_value_heads

    def projected(part, x):
        y = t[f"self_attn.{part}_proj.weight"] @ x + t.get(f"self_attn.{part}_proj.bias", 0)
        return list(y.view(-1, len(y) // (heads if part == "q" else heads // shared)))

    def turned(part, x, position):
        norm = t.get(f"self_attn.{part}_norm.weight")
        vectors = [y if norm is None else rms_norm(y, norm, eps) for y in projected(part, x)]
        return [rotated(y, position, theta, interleaved) for y in vectors]

    last, residual = entered[-1]
    seen = [(position, x) for position, x in entered if window is None or last - position < window]
    normed = [(position, rms_norm(x, t["input_layernorm.weight"], eps)) for position, x in seen]
    queries = turned("q", normed[-1][1], last)
    keys = [turned("k", x, position) for position, x in normed]
    values = [projected("v", x) for _, x in normed]
    mixed = []
    for h, query in enumerate(queries):
        weights = torch.stack([query @ key[h // shared] / math.sqrt(len(query)) for key in keys]).softmax(0)
        mixed.append(sum(a * value[h // shared] for a, value in zip(weights, values, strict=True)))
    hidden = residual + t["self_attn.o_proj.weight"] @ torch.cat(mixed)
    x = rms_norm(hidden, t["post_attention_layernorm.weight"], eps)
    up = F.silu(t["mlp.gate_proj.weight"] @ x) * (t["mlp.up_proj.weight"] @ x)
    return hidden + t["mlp.down_proj.weight"] @ up


def plain_module(tensors, naming, k, layers, config, hidden_first=False, **layer_options):
    """Module k of a checkpoint's tensors, as `slow_heads.mtp_outputs` takes it."""
    enorm, hnorm, projection, prefix, norm = names_of(naming, k, layers)
    t = {name: tensor.double() for name, tensor in tensors.items()}
    inner = {name.removeprefix(prefix): tensor for name, tensor in t.items() if name.startswith(prefix)}

    def normed(x, name):
        return rms_norm(x, t[f"{name}.weight"], config.rms_norm_eps)

    def enter(own, hidden):
        parts = [normed(own, enorm), normed(hidden, hnorm)]
        return t[f"{projection}.weight"] @ torch.cat(parts[::-1] if hidden_first else parts)

    return {
        "enter": enter,
        "layer": lambda entered: plain_layer(inner, entered, config, **layer_options),
        "norm": (lambda x: x) if norm is None else (lambda x: normed(x, norm)),
    }
