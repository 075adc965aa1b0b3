"""Training drawn at random: a base, a head and its options, and rows of which some tokens are learnt."""

import random
from dataclasses import dataclass

import torch

from specheads import convert
from specheads.losses.functions import DISTRIBUTION_LOSSES
from tests.support.families import VOCAB
from tests.support.random_calls import BASES, base_named

# Of these an MTP head is of a layer that runs in float64.
DENSE = ("Llama", "Qwen3", "GPT-2", "Gemma-3", "Ministral", "OPT", "GPT-NeoX", "Qwen2, sliding layers")
LOSSES = (*DISTRIBUTION_LOSSES, "hard", "hard:0.1,tv:1.8", "lk:0.5,ce:2")
STARTS = ({}, {}, {"dpace": 0.0}, {"dpace": 0.5}, {"anchors": 1}, {"anchors": 4}, {"anchors": 3, "anchor_first": True})
DEPTHS = {"num_heads": (1, 2, 5), "num_layers": (1, 2), "decay": (0.7,), "tap": (0, 2)}
BLOCKS = {"num_attention_heads": (4,), "num_key_value_heads": (1, 2), "head_dim": (4, 8), "attention_bias": (True,)}
VOCABULARY = {"draft_vocab_size": (20, 60, VOCAB)}
# Kind → options, each of them given in half of the cases, and their values.
OPTIONS = {
    "medusa": DEPTHS | VOCABULARY,
    "hydra": DEPTHS | VOCABULARY | {"prefix_layer": (True,)},
    "eagle": BLOCKS | {
        "steps": (2, 3), "num_layers": (2,), "noise": (0.0,), "metric_steps": (1, 3), "fc_bias": (True,),
        "feature_weight": (0.0, 0.3), "token_loss_weight": (1.0,), "taps": ((1,), (2,)),
    },
    "eagle3": BLOCKS | VOCABULARY | {
        "steps": (1, 2, 4), "num_layers": (2, 3), "norm_before_residual": (False,), "norm_output": (True,),
        "norm_features": (True,), "step_decay": (1.0, 0.6), "taps": ((2,), (0, 1, 3)),
    },
    "mtp": {
        "num_modules": (2, 3), "steps": (3, 4), "hidden_first": (True,), "final_norm": (False,),
        "norm_output": (False,), "fc_bias": (True,), "zero_first_embedding": (True,), "step_decay": (1.0, 0.6),
    },
    "parallel": BLOCKS | VOCABULARY | {
        "block_size": (2, 3, 5), "causal": (False,), "markov_rank": (0, 4), "confidence": (True,),
        "sample_from_anchor": (False,), "num_layers": (1, 2), "decay": (0.7,), "mask_token_id": (5,),
    },
}  # fmt: skip


@dataclass
class Training:
    """base: its family. kind, options: of the head. rows: of token ids and labels. mode: does the model train, or
    evaluate?"""

    base: str
    kind: str
    options: dict
    rows: list[dict]
    mode: bool

    def model(self):
        """In float64; no part of the head is the identity, as it may be at first. ValueError where the base cannot have
        such a head."""
        base = base_named(self.base)
        torch.manual_seed(0)
        model = convert(base, self.kind, dtype=base.dtype, **self.options)
        if model.head.target_ids is not None:
            model.head.set_draft_vocabulary(torch.randint(0, 100, (VOCAB,)), base)
        with torch.no_grad():
            for parameter in model.head.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn_like(parameter)
        return model.train(self.mode)

    @property
    def learnt(self):
        return sum(label != -100 for row in self.rows for label in row["labels"])

    @property
    def samples(self):
        """Does a step learn a sample that depends on the row as it is given, or add noise to it?"""
        chance = "anchors" in self.options or self.kind == "parallel"
        return self.mode and (chance or (self.kind == "eagle" and "noise" not in self.options))


def draw_rows(coin, count, longest=22):
    """Rows of which all tokens are learnt, some, one turn or none."""
    made = []
    for _ in range(count):
        length = coin.choice((1, 2, 3, 4, 6, 9, 13, longest))
        ids = [coin.randrange(3, VOCAB) for _ in range(length)]
        start, end = sorted(coin.choices(range(length + 1), k=2))
        kept = coin.choice((range(length), coin.sample(range(length), length // 2), range(start, end)))
        made.append({"input_ids": ids, "labels": [token if i and i in kept else -100 for i, token in enumerate(ids)]})
    return made


def draw(seed):
    """The training of this seed, and its model."""
    coin = random.Random(seed)
    while True:
        kind = coin.choice(list(OPTIONS))
        options = {name: coin.choice(values) for name, values in OPTIONS[kind].items() if coin.random() < 0.5}
        some = coin.choice(STARTS)
        options |= {"loss": coin.choice(LOSSES)} | (some if kind != "parallel" or "anchor_first" not in some else {})
        if kind == "mtp":
            options.setdefault("steps", 3)
        base = coin.choice(DENSE if kind == "mtp" or coin.random() < 0.5 else list(BASES))
        training = Training(base, kind, options, draw_rows(coin, coin.choice((1, 2, 3, 5))), coin.random() < 0.75)
        try:
            return training, training.model()
        except ValueError:
            continue
