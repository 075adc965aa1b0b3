"""Draft heads on a tiny base, and a slow implementation of their losses that shares no code with them."""

import functools
import math

import torch
import torch.nn.functional as F

from specheads.models.convert import convert
from tests.support.tiny_models import tiny_llama

LATENT = {"kv_lora_rank": 6, "q_lora_rank": 5, "head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 7}
KINDS = ("medusa", "hydra", "eagle", "eagle3", "mtp", "parallel")
DEFAULTS = {
    "medusa": {"num_heads": 3, "num_layers": 2},
    "hydra": {"num_heads": 3, "num_layers": 2},
    "eagle": {"metric_steps": 3, "noise": 0.0},
    "eagle3": {"steps": 3, "draft_vocab_size": 40},
    "mtp": {"steps": 3},
    "parallel": {"block_size": 3, "markov_rank": 4},
}
# Windows that hold fewer positions than a text or a draft, in all blocks or in one.
WINDOWED = [
    ("hydra", {"prefix_layer": True, "sliding_window": 3}),
    ("eagle", {"sliding_window": 1, "steps": 3}),
    ("eagle3", {"sliding_window": 1, "num_layers": 2, "layer_types": ("full_attention", "sliding_attention")}),
    ("eagle3", {"sliding_window": 3}),
    ("mtp", {"sliding_window": 3}),
    ("mtp", {"sliding_window": 2, "num_modules": 2}),
    ("parallel", {"sliding_window": 4}),
    (
        "parallel",
        {"sliding_window": 4, "block_size": 4, "causal": False, "causal_windows": True,
         "layer_types": ("sliding_attention", "full_attention"), "sample_from_anchor": False},
    ),
    ("parallel", {"sliding_window": 3, "causal": False, "markov_rank": 0}),
]  # fmt: skip
# Forms of the parallel head's block that its usual options do not have.
OWN_SLOTS = {"sample_from_anchor": False, "block_size": 4, "causal": False}
FORMS = {
    "DFlash 2": {
        **OWN_SLOTS, "markov_type": "selector", "candidates": 5, "conv_taps": 2, "conv_group": 8, "mask_token_id": 5,
    },
    "selector alone": {"markov_type": "selector", "candidates": 3, "confidence": True, "draft_vocab_size": 40},
    "convolution alone": {"markov_rank": 0, "conv_taps": 3, "conv_group": 16, "logit_scale": 0.7, "logit_cap": 2.0},
    "gated": {"markov_type": "gated", "confidence": True},
    "rnn": {**OWN_SLOTS, "markov_type": "rnn", "confidence": True, "confidence_markov": False},
    "Domino": {
        "markov_type": "domino", "gru_size": 6, "confidence": True, "causal": False, "mask_token_id": 5,
        "own_mask": True,
    },
    "Domino, all corrected": {**OWN_SLOTS, "markov_type": "domino", "gru_size": 6, "plain_drafts": 0},
}  # fmt: skip


def spec_model(kind, base=None, **options):
    """A head with perturbed weights, so that no part of it is the identity, on a tiny float64 Llama or another base."""
    base = tiny_llama().double() if base is None else base
    model = convert(base, kind, dtype=base.dtype, **{**DEFAULTS[kind], **options})
    torch.manual_seed(1)
    if model.head.target_ids is not None:
        model.head.set_draft_vocabulary(torch.randint(0, 100, (len(model.head.t2d),)), base)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def shallow_spec_model(kind, base=None, **options):
    """spec_model on as few layers as it may have, for tests that trace or watch every operation of a step."""
    layers = 3 if kind == "eagle3" else 2
    return spec_model(kind, tiny_llama(num_hidden_layers=layers).double() if base is None else base, **options)


def rows(*lengths, seed=2):
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for length in lengths:
        ids = torch.randint(3, 97, (length,), generator=generator).tolist()
        kept = torch.rand(length, generator=generator) < 0.7
        texts.append({"input_ids": ids, "labels": [i if k else -100 for i, k in zip(ids, kept.tolist(), strict=True)]})
        texts[-1]["labels"][0] = -100
    return texts


# The slow implementation: one row, one position, one step at a time, from the weights alone.


def rms_norm(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean() + eps) * weight


@functools.cache
def rotation(size, position, theta):
    """(size, size) the matrix that turns each plane (j, j + size/2) by its angle at this position, or its own."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for j in range(size // 2):
        angle, k = (position[j] if isinstance(position, tuple) else position) * theta ** (-2 * j / size), j + size // 2
        matrix[j, j] = matrix[k, k] = math.cos(angle)
        matrix[k, j], matrix[j, k] = math.sin(angle), -math.sin(angle)
    return matrix


def rotate(x, position, theta=10_000.0, share=1.0):
    """RoPE of one head's vector (d,), or of this share of it alone, the first values."""
    width = int(len(x) * share)
    return torch.cat([rotation(width, position, theta).to(x) @ x[:width], x[width:]])


ACTIVATIONS = {
    "silu": lambda x: x / (1 + (-x).exp()), "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_pytorch_tanh": lambda x: x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
}  # fmt: skip


def window_of(config, layer=0):
    """How many positions a block attends, its own included; None: all."""
    slides = config.layer_types is None or config.layer_types[layer] == "sliding_attention"
    return config.sliding_window if slides else None


def block_output(w, inputs, residuals, positions, heads=4, shared=2, window=None, act="silu", share=1.0):
    """The output (H,) of the last of a list of rows that attend causally: plain attention over a short sequence.

    window: how many positions it attends, its own included; None: all. act: of the MLP; share: of a head, rotated. With
    norms on queries and keys if it has any."""

    def turned(x, norm, position):
        return rotate(rms_norm(x, w[norm]) if norm in w else x, position, share=share)

    if window is not None:
        near = [n for n, position in enumerate(positions) if position > positions[-1] - window]
        inputs, residuals, positions = ([each[n] for n in near] for each in (inputs, residuals, positions))
    if "kv_b_proj.weight" in w:
        return block_rest(w, residuals[-1], latent_attention(w, inputs, positions, heads), act)
    size = len(w["q_proj.weight"]) // heads
    q = w["q_proj.weight"] @ inputs[-1]
    mixed = []
    for h in range(heads):
        kv = h // (heads // shared)
        part = slice(kv * size, (kv + 1) * size)
        query = turned(q[h * size : (h + 1) * size], "q_norm.weight", positions[-1])
        scores, values = [], []
        for x, position in zip(inputs, positions, strict=True):
            scores.append(query @ turned((w["k_proj.weight"] @ x)[part], "k_norm.weight", position) / math.sqrt(size))
            values.append((w["v_proj.weight"] @ x)[part])
        weights = torch.stack(scores).softmax(0)
        mixed.append(sum(a * v for a, v in zip(weights, values, strict=True)))
    return block_rest(w, residuals[-1], torch.cat(mixed), act)


def latent_attention(w, inputs, positions, heads):
    """What the last row mixes (heads · value size,), keys and values made from one narrow vector a row."""
    rank = w["kv_b_proj.weight"].shape[1]
    turned = len(w["kv_a_proj_with_mqa.weight"]) - rank
    value = w["o_proj.weight"].shape[1] // heads
    plain = len(w["kv_b_proj.weight"]) // heads - value

    def rotated(x, position):
        pairs = x.view(-1, 2)
        angles = [position * 10_000.0 ** (-2 * j / turned) for j in range(turned // 2)]
        return torch.stack([
            part for (a, b), angle in zip(pairs, angles, strict=True)
            for part in (a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle))
        ])  # fmt: skip

    q = w["q_b_proj.weight"] @ rms_norm(w["q_a_proj.weight"] @ inputs[-1], w["q_a_layernorm.weight"])
    narrow = [w["kv_a_proj_with_mqa.weight"] @ x for x in inputs]
    wide = [w["kv_b_proj.weight"] @ rms_norm(each[:rank], w["kv_a_layernorm.weight"]) for each in narrow]
    mixed = []
    for h in range(heads):
        query = q[h * (plain + turned) : (h + 1) * (plain + turned)]
        both = [each[h * (plain + value) : (h + 1) * (plain + value)] for each in wide]
        scores = [
            query[:plain] @ k[:plain] + rotated(query[plain:], positions[-1]) @ rotated(each[rank:], position)
            for k, each, position in zip(both, narrow, positions, strict=True)
        ]
        weights = (torch.stack(scores) / math.sqrt(plain + turned)).softmax(0)
        mixed.append(sum(a * kv[plain:] for a, kv in zip(weights, both, strict=True)))
    return torch.cat(mixed)


def block_rest(w, residual, mixed, act):
    """What follows attention in a block."""
    hidden = residual + w["o_proj.weight"] @ mixed
    x = rms_norm(hidden, w["post_attention_layernorm.weight"])
    return hidden + w["down_proj.weight"] @ (ACTIVATIONS[act](w["gate_proj.weight"] @ x) * (w["up_proj.weight"] @ x))


def block_weights(head, prefix="blocks.0."):
    return {
        name.removeprefix(prefix): p for name, p in head.state_dict(keep_vars=True).items() if name.startswith(prefix)
    }


def stack_output(head, inputs, residuals, positions):
    """The same through all blocks of a head: in each, every row attends the rows before it."""
    outputs: list = []
    for layer in range(head.config.num_layers):
        w = block_weights(head, f"blocks.{layer}.")
        if layer:
            norm = head.later_norms[layer - 1].weight
            inputs, residuals = [rms_norm(x, norm) for x in outputs], outputs
        ends = range(len(inputs)) if layer + 1 < head.config.num_layers else [len(inputs) - 1]
        config, window = head.config, window_of(head.config, layer)
        form = {"act": config.hidden_act, "share": config.rope_parameters.get("partial_rotary_factor", 1.0)}
        outputs = [
            block_output(w, inputs[: n + 1], residuals[: n + 1], positions[: n + 1], window=window, **form)
            for n in ends
        ]
    return outputs[-1]


def slow_drafts(model, ids, features, steps, first, following, next_hidden=lambda output: output, masked=None):
    """{(i, s): (hidden, …)}: at each position i the blocks run on the true prefix, then on their own outputs.

    first(i): the hidden a true position enters with; following(token, hidden): the first block's input and residual;
    next_hidden(output): the hidden that the next step enters with. masked: of P-EAGLE, the token and the features that
    later steps enter with instead.
    """
    own = model.head.state_dict(keep_vars=True).get("embed_tokens.weight")
    embedded = model.base.get_input_embeddings().weight if own is None else own
    outputs = {}
    for i in range(len(ids) - 1):
        entered = [following(embedded[ids[j + 1]], first(features[j])) for j in range(i + 1)]
        positions = list(range(i + 1))
        for s in range(steps):
            if i + 1 + s >= len(ids):
                break
            if s:
                token, hidden = ids[i + 1 + s], next_hidden(outputs[i, s - 1])
                if masked is not None:
                    token, hidden = masked[0], first(masked[1])
                entered.append(following(embedded[token], hidden))
                positions.append(i + s)
            places = [model.place(at) for at in positions] if hasattr(model, "place") else positions
            outputs[i, s] = stack_output(model.head, [x for x, _ in entered], [r for _, r in entered], places)
    return outputs


def taps(model, ids):
    out = model.base(torch.tensor([ids]), output_hidden_states=True)
    return [torch.cat(parts) for parts in zip(*(out.hidden_states[k][0] for k in model.head.layers), strict=True)], out


def soft_ce(logits, teacher):
    return -(teacher.softmax(0) * logits.log_softmax(0)).sum()


def slow_medusa(model, row):
    ids, labels = row["input_ids"], row["labels"]
    features, out = taps(model, ids)
    w = model.head.state_dict(keep_vars=True)
    drafted = (torch.arange(len(w["d2t"])) + w["d2t"]).tolist()
    total, ranks = 0.0, {}
    for i in range(len(ids)):
        for k in range(3):
            x = features[i]
            for layer in range(2):
                name = f"blocks.{k}.{layer}.linear"
                x = x + F.silu(w[f"{name}.weight"] @ x + w[f"{name}.bias"])
            logits = w[f"lm_heads.{k}.weight"] @ x
            if i + 2 + k < len(ids) and labels[i + 2 + k] != -100:
                if ids[i + 2 + k] in drafted:
                    total = total - 0.8**k * logits.log_softmax(0)[drafted.index(ids[i + 2 + k])]
                best = int(out.logits[0, i + 1 + k].argmax())
                ranks[i, k] = int((logits > logits[drafted.index(best)]).sum()) if best in drafted else -1
    return total, ranks


def slow_hydra(model, row):
    ids, labels = row["input_ids"], row["labels"]
    features, out = taps(model, ids)
    w = model.head.state_dict(keep_vars=True)
    embedded = model.base.get_input_embeddings().weight
    drafted = (torch.arange(len(w["d2t"])) + w["d2t"]).tolist()
    if model.head.config.prefix_layer:
        block = block_weights(model.head, "prefix.block.")
        normed = [rms_norm(f, w["prefix.input_layernorm.weight"]) for f in features]
        window = window_of(model.head.config)
        mixed = [
            block_output(block, normed[: i + 1], features[: i + 1], range(i + 1), window=window)
            for i in range(len(ids))
        ]
        features = [rms_norm(x, w["prefix.norm.weight"]) for x in mixed]
    total, ranks = 0.0, {}
    for i in range(len(ids)):
        for k in range(3):
            if i + 2 + k >= len(ids) or labels[i + 2 + k] == -100:
                continue
            wide = torch.cat([features[i], *(embedded[ids[i + 1 + j]] for j in range(k + 1))])
            first = f"blocks.{k}.0"
            x = w[f"{first}.res_connection.weight"] @ wide + w[f"{first}.res_connection.bias"]
            x = x + F.silu(w[f"{first}.linear.weight"] @ wide + w[f"{first}.linear.bias"])
            x = x + F.silu(w[f"blocks.{k}.1.linear.weight"] @ x + w[f"blocks.{k}.1.linear.bias"])
            logits = w[f"lm_heads.{k}.weight"] @ x + w[f"lm_heads.{k}.bias"]
            teacher = out.logits[0, i + 1 + k]
            best = int(teacher.argmax())
            ranks[i, k] = -1
            if best in drafted:
                total = total + soft_ce(logits, teacher[drafted])
                ranks[i, k] = int((logits > logits[drafted.index(best)]).sum())
    return total, ranks


def slow_eagle(model, row):
    ids, labels = row["input_ids"], row["labels"]
    features, out = taps(model, ids)
    fc, lm_head = model.head.fc.weight, model.base.lm_head.weight

    def following(embedded, hidden):
        x = fc @ torch.cat([embedded, hidden])
        return x, x

    drafts = slow_drafts(model, ids, features, 3, lambda f: f, following)
    total, ranks = 0.0, {}
    for (i, s), predicted in drafts.items():
        if i + 2 + s < len(ids) and labels[i + 2 + s] != -100:
            teacher, logits = out.logits[0, i + 1 + s], lm_head @ predicted
            if s < model.head.config.steps:
                gap = (predicted - features[i + 1 + s]).abs()
                total = total + torch.where(gap < 1, 0.5 * gap * gap, gap - 0.5).mean() + 0.1 * soft_ce(logits, teacher)
            ranks[i, s] = int((logits > logits[teacher.argmax()]).sum())
    return total, ranks


def slow_eagle3(model, row):
    ids, labels = row["input_ids"], row["labels"]
    features, out = taps(model, ids)
    w = model.head.state_dict(keep_vars=True)
    drafted, config = (torch.arange(40) + w["d2t"]).tolist(), model.head.config

    def fused(feature):
        if config.norm_features:
            taps = [rms_norm(feature[32 * k : 32 * k + 32], w[f"fc_norm.{k}.weight"]) for k in range(3)]
            feature = torch.cat(taps)
        if config.norm_before_fc:
            feature = rms_norm(feature, w["input_norm.weight"])
        return w["fc.weight"] @ feature

    def following(embedded, hidden):
        normed = rms_norm(hidden, w["hidden_norm.weight"])
        x = torch.cat([rms_norm(embedded, w["input_layernorm.weight"]), normed])
        return x, normed if config.norm_before_residual else hidden

    def next_hidden(output):
        return rms_norm(output, w["norm.weight"]) if config.norm_output else output

    masked = None if config.mask_token_id is None else (config.mask_token_id, w["mask_hidden.weight"][0])
    drafts = slow_drafts(model, ids, features, 3, fused, following, next_hidden, masked)
    total, ranks = 0.0, {}
    for (i, s), hidden in drafts.items():
        if i + 2 + s < len(ids) and labels[i + 2 + s] != -100:
            teacher = out.logits[0, i + 1 + s]
            logits = model.head.lm_head.weight @ rms_norm(hidden, model.head.norm.weight)
            best = int(teacher.argmax())
            if best in drafted:
                total = total + 0.8**s * soft_ce(logits, teacher[drafted])
                ranks[i, s] = int((logits > logits[drafted.index(best)]).sum())
            else:
                ranks[i, s] = -1
    return total, ranks


def mtp_outputs(modules, embedded, ids, features, steps, norm_output=True, zero_first=False):
    """{(i, s): (fed, normed)}: from each position i the modules run over the true tokens before, then the drafted ones.

    modules: dicts of enter(embedding, hidden) → x (H,), layer([(position, x)]) → the last one's output, and norm.
    Module k reads at position j the token j + 1, and what module k − 1 gave at j − 1; the first reads the target's
    hidden state, or where that is not known yet, what drafted token j.
    """
    n, outputs = len(modules), {}
    for i in range(len(ids) - 1):
        entered, before = [[] for _ in range(n)], None  # before: what the modules gave at position j − 1
        for j in range(min(i + steps, len(ids) - 1)):
            now = []
            for k, module in enumerate(modules):
                if j < k:
                    now.append(None)
                    continue
                hidden = before[k - 1] if k else features[j] if j <= i else outputs[i, j - 1 - i][0]
                own = embedded[ids[j + 1]] * (0 if zero_first and j == 0 else 1)
                entered[k].append((j, module["enter"](own, hidden)))
                output = module["layer"](entered[k])
                normed = module["norm"](output)
                now.append((normed if norm_output else output, normed))
            if j >= i:
                outputs[i, j - i] = now[(j - i) % n]
            before = [None if each is None else each[0] for each in now]
    return outputs


def slow_mtp_module(model, k):
    """Module k of a head over a Llama, from its weights alone."""
    config, eps = model.head.config, model.base.config.rms_norm_eps
    w = {name.removeprefix(f"mtp.{k}."): p for name, p in model.head.state_dict(keep_vars=True).items()}
    inner = {".".join(name.split(".")[-2:]): p for name, p in w.items() if name.startswith("layers.0.")}

    def enter(own, hidden):
        parts = [rms_norm(own, w["enorm.weight"], eps), rms_norm(hidden, w["hnorm.weight"], eps)]
        return w["eh_proj.weight"] @ torch.cat(parts[:: -1 if config.hidden_first else 1]) + w.get("eh_proj.bias", 0)

    def layer(entered):
        positions, residuals = zip(*entered, strict=True)
        inputs = [rms_norm(x, inner["input_layernorm.weight"], eps) for x in residuals]
        return block_output(inner, inputs, residuals, positions, window=config.sliding_window)

    norm = (lambda x: rms_norm(x, w["norm.weight"], eps)) if config.final_norm else (lambda x: x)
    return {"enter": enter, "layer": layer, "norm": norm}


def slow_mtp(model, row):
    ids, labels, config = row["input_ids"], row["labels"], model.head.config
    features, out = taps(model, ids)
    total, ranks = 0.0, {}
    modules = [slow_mtp_module(model, k) for k in range(config.num_modules)]
    embedded = model.base.get_input_embeddings().weight
    outputs = mtp_outputs(
        modules, embedded, ids, features, config.steps, config.norm_output, config.zero_first_embedding
    )
    for (i, s), (_, normed) in outputs.items():
        if i + 2 + s < len(ids) and labels[i + 2 + s] != -100:
            teacher, logits = out.logits[0, i + 1 + s], model.base.lm_head.weight @ normed
            total = total + config.step_decay**s * soft_ce(logits, teacher)
            ranks[i, s] = int((logits > logits[teacher.argmax()]).sum())
    return total, ranks


def slow_block(model, ids, features, anchor, count):
    """The outputs of the slots of a block after ids[:anchor + 1], before the bias: `count` vectors (H,)."""
    w, config = model.head.state_dict(keep_vars=True), model.head.config
    embedded = model.base.get_input_embeddings().weight
    context = [rms_norm(w["fc.weight"] @ f, w["hidden_norm.weight"]) for f in features[:anchor]]
    mask = w["mask_embed.weight"][0] if "mask_embed.weight" in w else embedded[config.mask_token_id]
    hidden = [embedded[ids[anchor]], *[mask] * (count - 1)]
    for n in range(config.num_layers):
        part = {name.removeprefix(f"decoder.{n}."): p for name, p in w.items() if name.startswith(f"decoder.{n}.")}
        size = len(part["q_norm.weight"])
        normed = [rms_norm(h, part["input_layernorm.weight"]) for h in hidden]
        window = window_of(config, n)
        causal = config.causal if window is None or config.causal_windows is None else config.causal_windows
        normed, convolve = slow_convolution(part, "attention_conv.", normed)
        mixtures = []
        for j in range(count):
            first = 0 if window is None else max(0, anchor + j + 1 - window)
            seen = [*context, *(normed[: j + 1] if causal else normed)][first:]
            mixed = []
            for h in range(4):
                own = slice(h * size, (h + 1) * size)
                shared = slice(h // 2 * size, (h // 2 + 1) * size)
                query = rotate(rms_norm((part["q_proj.weight"] @ normed[j])[own], part["q_norm.weight"]), anchor + j)
                keys = [rms_norm((part["k_proj.weight"] @ x)[shared], part["k_norm.weight"]) for x in seen]
                scores = [query @ rotate(key, position) / math.sqrt(size) for position, key in enumerate(keys, first)]
                weights = torch.stack(scores).softmax(0)
                mixed.append(sum(a * (part["v_proj.weight"] @ x)[shared] for a, x in zip(weights, seen, strict=True)))
            mixtures.append(part["o_proj.weight"] @ torch.cat(mixed))
        hidden = [h + x for h, x in zip(hidden, convolve(mixtures), strict=True)]
        normed = [rms_norm(h, part["post_attention_layernorm.weight"]) for h in hidden]
        normed, convolve = slow_convolution(part, "mlp_conv.", normed)
        gated = [F.silu(part["gate_proj.weight"] @ y) * (part["up_proj.weight"] @ y) for y in normed]
        moved = convolve([part["down_proj.weight"] @ y for y in gated])
        hidden = [h + x for h, x in zip(hidden, moved, strict=True)]
    return [rms_norm(h, w["norm.weight"]) for h in hidden]


def slow_convolution(part, prefix, inputs):
    """The inputs of a sublayer, a vector (H,) for each slot, convolved; and what convolves its outputs."""
    if f"{prefix}base_kernel" not in part:
        return inputs, lambda outputs: outputs
    base = part[f"{prefix}base_kernel"]
    _, taps, size = base.shape
    changes = [(part[f"{prefix}kernel_projection.weight"] @ x).view(2, taps, -1) for x in inputs]
    group = size // changes[0].shape[2]

    def convolve(side, vectors):
        return [
            torch.stack([
                sum(
                    (base[side, tap, c] + changes[i][side, tap, c // group]) * vectors[i - tap][c]
                    for tap in range(taps) if tap <= i
                )
                for c in range(size)
            ])
            for i in range(len(vectors))
        ]  # fmt: skip

    return convolve(0, inputs), lambda outputs: convolve(1, outputs)


def slow_slots(model, slots, before):
    """For each slot's output (H,), given the tokens before it from the root on: its own logits, what it drafts by, and
    its confidence as a logit."""
    w, config = model.head.state_dict(keep_vars=True), model.head.config
    embedded, result = model.base.get_input_embeddings().weight, []
    state = torch.zeros(config.gru_size if config.markov_type == "domino" else config.markov_rank, dtype=slots[0].dtype)
    for j, (hidden, token) in enumerate(zip(slots, before, strict=False)):
        unary = w.get("lm_head.weight", model.base.lm_head.weight) @ hidden * config.logit_scale
        if config.logit_cap is not None:
            unary = config.logit_cap * torch.tanh(unary / config.logit_cap)
        logits, read = unary, hidden
        if config.markov_rank and config.markov_type != "domino":
            own = w["markov_embed.weight"][token]
            read = torch.cat([hidden, own]) if config.confidence_markov else hidden
            z = own
            if config.markov_type == "gated":
                gate = w["markov.gate_proj.weight"] @ torch.cat([hidden, own]) + w["markov.gate_proj.bias"]
                z = own / (1 + torch.exp(-gate))
            elif config.markov_type == "rnn":
                every = w["markov.joint_proj.weight"] @ torch.cat([state, own, hidden]) + w["markov.joint_proj.bias"]
                gate, candidate, output = every.chunk(3)
                kept = 1 / (1 + torch.exp(-gate))
                state, z = kept * state + (1 - kept) * torch.tanh(candidate), torch.tanh(output)
            elif config.markov_type == "selector":
                z = own * (w["markov.proj.weight"] @ hidden)
            logits = unary + w["markov_lm_head.weight"] @ z
        elif config.markov_rank:
            x, h = (
                side @ v
                for side, v in (
                    (w["markov.gru.weight_ih"], embedded[token]), (w["markov.gru.weight_hh"], state),
                )
            )  # fmt: skip
            n = config.gru_size
            reset, update = torch.sigmoid(x[:n] + h[:n]), torch.sigmoid(x[n : 2 * n] + h[n : 2 * n])
            state = (1 - update) * torch.tanh(x[2 * n :] + reset * h[2 * n :]) + update * state
            if j >= config.plain_drafts:
                z = F.silu(w["markov.proj.weight"] @ torch.cat([hidden, state]))
                logits = unary + w["markov_lm_head.weight"] @ z
        sure = w["confidence.weight"][0] @ read + w["confidence.bias"][0] if "confidence.weight" in w else None
        result.append((unary, logits, sure))
    return result


def slow_parallel(model, row, anchors=None):
    ids, labels, config = row["input_ids"], row["labels"], model.head.config
    features, out = taps(model, ids)
    drafted = (torch.arange(len(model.head.d2t)) + model.head.d2t).tolist()
    choosing, domino = config.markov_type == "selector", config.markov_type == "domino"
    share = max(0.0, 1 - 2 * model.progress) if domino and model.training else 0.0
    total, ranks = 0.0, {}
    for anchor in range(1, len(ids) - 1) if anchors is None else anchors:
        if labels[anchor + 1] == -100:
            continue
        slots = slow_block(model, ids, features, anchor, config.block_size)
        # Slot j is at position anchor + j, and predicts the token there or the next one.
        slots = slots if config.sample_from_anchor else slots[1:]
        for j, (unary, logits, confidence) in enumerate(slow_slots(model, slots, ids[anchor:])):
            if anchor + 1 + j >= len(ids) or labels[anchor + 1 + j] == -100:
                break
            teacher = out.logits[0, anchor + j]
            best, p = int(teacher.argmax()), teacher[drafted].softmax(0)
            kept, least = list(range(len(logits))), None
            if choosing:
                kept = unary.sort(descending=True, stable=True).indices[: config.candidates].tolist()
                least = kept[-1]
            if best in drafted:
                label = drafted.index(best)
                for part, weight in ((unary, 1.0),) if choosing else ((logits, 1 - share), (unary, share)):
                    total = total + weight * config.decay**j * (p * (p / part.softmax(0)).log()).sum()
                if choosing:
                    among = [label if token == least and label not in kept else token for token in kept]
                    chosen = logits[among].softmax(0)[among.index(label)]
                    total = total - config.selector_weight * config.decay**j * chosen.log()
            if confidence is not None:
                q = logits[kept].softmax(0)
                alpha = torch.minimum(q, teacher.softmax(0)[[drafted[token] for token in kept]]).sum().detach()
                chance = torch.sigmoid(confidence)
                total = total - config.decay**j * (alpha * chance.log() + (1 - alpha) * (1 - chance).log())
            known = best in drafted and drafted.index(best) in kept
            ranks[anchor - 1, j] = int((logits[kept] > logits[drafted.index(best)]).sum()) if known else -1
    return total, ranks


SLOW = {
    "medusa": slow_medusa,
    "hydra": slow_hydra,
    "eagle": slow_eagle,
    "eagle3": slow_eagle3,
    "mtp": slow_mtp,
    "parallel": slow_parallel,
}
