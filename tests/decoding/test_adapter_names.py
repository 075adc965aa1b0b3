"""adapter_names: each row of a batch has an adapter of its own, as peft decodes it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import specheads
from specheads import DraftModel
from tests.support.families import FAMILIES, build
from tests.support.prompts import BATCHES


def test_every_row_may_have_an_adapter_of_its_own_as_in_peft():
    for name in ["Llama", "Mistral"]:
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        base = build(*FAMILIES[name])
        model = get_peft_model(base, config, "one").eval()
        model.add_adapter("two", config)
        inputs, names = BATCHES["ragged"], ["two", "__base__", "one"]
        options = {"max_new_tokens": 12, "do_sample": False, "adapter_names": names}
        expected = model.generate(**inputs, **options)
        assert not torch.equal(expected, model.generate(**inputs, max_new_tokens=12, do_sample=False))
        for draft in (False, "lookup", DraftModel(model)):
            assert torch.equal(
                specheads.generate(
                    model, inputs["input_ids"], attention_mask=inputs["attention_mask"], draft=draft, **options
                ),
                expected,
            )
        assert torch.equal(
            specheads.generate(model, **inputs, **options, num_beams=2),
            model.generate(**inputs, **options, num_beams=2),
        )
        with pytest.raises(ValueError, match="give the peft model itself"):
            specheads.generate(base, **inputs, **options)
        with pytest.raises(ValueError, match="takes no adapter_names="):
            specheads.generate_many(model, [[3, 4]], **options)
