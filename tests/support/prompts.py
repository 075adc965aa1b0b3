"""Prompts of unlike length, padded into batches."""

import torch

V, PAD = 97, 0


PROMPTS = ([27, 42, 22, 85, 13, 36], [44], [5, 5, 81, 62, 30, 7, 12, 90, 17])


def padded(rows, side="left"):
    longest = max(map(len, rows))
    fill = [[PAD] * (longest - len(row)) for row in rows]
    blank = [[0] * len(more) for more in fill]
    real = [[1] * len(row) for row in rows]
    if side == "right":
        fill, rows, blank, real = rows, fill, real, blank
    ids = torch.tensor([[*a, *b] for a, b in zip(fill, rows, strict=True)])
    mask = torch.tensor([[*a, *b] for a, b in zip(blank, real, strict=True)])
    return {"input_ids": ids, "attention_mask": mask}


BATCHES = {"one": padded(PROMPTS[:1]), "ragged": padded(PROMPTS)}
