"""Optimizers of a run: learning rates by parameter name, and Muon beside AdamW."""

import io
import json

import pytest
import torch
from torch.optim import AdamW

from specheads.training.trainer import optim
from specheads.training.trainer.optim import Muon, MuonAdamW, orthogonalize, parameter_groups
from tests.support.trainers import model_of, trainer_of, weights


def test_learning_rates_go_by_parameter_name(tmp_path):
    model = model_of()
    before = weights(model)
    trainer = trainer_of(
        tmp_path, model, head_lr_groups={"lm_head": 0.0, r"norm": 4.0}, weight_decay=0.1, lr_scheduler_type="constant"
    )
    trainer.train()
    rates = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            rates[names[id(parameter)]] = (group["lr"], group["weight_decay"])
    assert rates["head.lm_head.weight"] == (0.0, 0.1)
    assert rates["head.norm.weight"] == (pytest.approx(4e-2), 0.0)
    assert rates["head.fc.weight"] == (1e-2, 0.1)
    assert len(rates) == len(list(model.head.parameters()))
    after = weights(model)
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert not torch.equal(after["fc.weight"], before["fc.weight"])


def test_learning_rate_options_that_cannot_work_say_why(tmp_path):
    with pytest.raises(ValueError, match="'lm_haed' matches no parameter; the head's are head"):
        trainer_of(tmp_path, head_lr_groups={"lm_haed": 2.0}).create_optimizer()
    with pytest.raises(ValueError, match="is no regular expression"):
        trainer_of(tmp_path, head_lr_groups={"(": 2.0})
    with pytest.raises(ValueError, match="factor -1"):
        trainer_of(tmp_path, head_lr_groups={"fc": -1})
    with pytest.raises(ValueError, match="muon=true needs optim"):
        trainer_of(tmp_path, muon=True, optim="sgd")
    with pytest.raises(ValueError, match=r"head_lr_groups='fc:2': expected \{regular expression: factor\}, as JSON"):
        trainer_of(tmp_path, head_lr_groups="fc:2")
    assert trainer_of(tmp_path, head_lr_groups=json.dumps({"fc": 2})).args.lr_multipliers == {"fc": 2}


def two_layers():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"hidden": torch.nn.Linear(6, 4), "lm_head": torch.nn.Linear(4, 5, bias=False)})


def grouped(module):
    return parameter_groups(
        module.named_parameters(), learning_rate=0.1, weight_decay=0.01, decayed=["hidden.weight", "lm_head.weight"],
        multipliers={},
    )  # fmt: skip


def test_muon_and_adamw_step_as_torchs_do_apart(monkeypatch):
    monkeypatch.setattr(optim, "bfloat16_is_fast", lambda device: True)  # torch's has no other precision
    ours, apart = two_layers(), two_layers()
    optimizer = MuonAdamW(grouped(ours))
    theirs = torch.optim.Muon([apart["hidden"].weight], lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    decayed = {"params": [apart["lm_head"].weight], "weight_decay": 0.01}
    adamw = AdamW([decayed, {"params": [apart["hidden"].bias], "weight_decay": 0.0}], lr=0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (optimizer, theirs, adamw)]
    for step in range(5):
        if step == 2:  # the state goes through a file, as in a resumed run
            kept = optimizer.state_dict()
            optimizer = MuonAdamW(grouped(ours))
            buffer = io.BytesIO()
            torch.save(kept, buffer)
            buffer.seek(0)
            optimizer.load_state_dict(torch.load(buffer, weights_only=True))
            schedulers[0].optimizer = optimizer
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(3, 6, generator=generator)
        for module in (ours, apart):
            module.zero_grad()
            module["lm_head"](module["hidden"](x)).square().sum().backward()
        for each in (optimizer, theirs, adamw, *schedulers):
            each.step()
    for (name, mine), other in zip(ours.named_parameters(), apart.parameters(), strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5)])
def test_muon_scales_its_steps_as_torchs_does(shape, monkeypatch):
    monkeypatch.setattr(optim, "bfloat16_is_fast", lambda device: True)
    for like_adamw, name in ((True, "match_rms_adamw"), (False, "original")):
        start, gradient = torch.randn(shape), torch.randn(shape)
        ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
        for optimizer in (
            Muon([ours], lr=0.3, like_adamw=like_adamw),
            torch.optim.Muon([theirs], 0.3, adjust_lr_fn=name),
        ):
            for _ in range(3):
                ours.grad, theirs.grad = gradient.clone(), gradient.clone()
                optimizer.step()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(6, 11), (11, 6)])
def test_muons_update_has_the_singular_vectors_of_the_gradient_and_is_float32_without_fast_bfloat16(shape, monkeypatch):
    monkeypatch.setattr(optim, "bfloat16_is_fast", lambda device: False)
    matrix = torch.randn(shape)
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    update = orthogonalize(matrix)
    assert update.dtype == torch.float32
    assert torch.allclose(update.double(), u * values @ v, atol=1e-5)
