"""Every decoder-only family is decoded to the base's own greedy text, or refused with the reason.

Each family is a tiny random model of tests/support/families.py; a drafter that knows the greedy text makes the trees
accept deeply and by different lengths in each row, which untrained heads never would.
"""

import copy
import itertools

import pytest
import torch
import transformers

from specheads import DynamicTree, Target, UnsupportedModel, convert, generate
from specheads.decoding.verify.hf_base import has_state, logits_of
from specheads.decoding.verify.model_inputs import cache_argument
from specheads.decoding.verify.taps import decoder_layers
from specheads.heads.layers.block import final_norm
from tests.support.families import (
    BOUNDARY,
    FAMILIES,
    LATENT,
    LENGTH_DEPENDENT,
    RECURRENT,
    VOCAB,
    build,
    skip_where_transformers_loses_the_cache,
)
from tests.support.knowing_drafter import KnowingDrafter

ALL = FAMILIES | RECURRENT

LENGTHS, NEW = (5, 17, 11), 32


def ragged_prompts():
    """Three prompts of LENGTHS, padded on the left."""
    seed, columns = torch.Generator().manual_seed(1), max(LENGTHS)
    ids, mask = torch.zeros(len(LENGTHS), columns, dtype=torch.long), torch.zeros(len(LENGTHS), columns).long()
    for row, length in enumerate(LENGTHS):
        ids[row, columns - length :] = torch.randint(3, VOCAB, (length,), generator=seed)
        mask[row, columns - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def greedy(base, inputs, **kwargs):
    """The base's own greedy continuation: sequences as generate() gives them, and each row's text unpadded."""
    sequences = base.generate(**inputs, max_new_tokens=NEW, do_sample=False, **kwargs)
    return sequences, [row[max(LENGTHS) - length :].tolist() for row, length in zip(sequences, LENGTHS, strict=True)]


@pytest.fixture(scope="module", params=ALL)
def family(request):
    """One family's model, its prompts, its greedy sequences and texts."""
    base, inputs = build(*ALL[request.param]), ragged_prompts()
    sequences, texts = greedy(base, inputs)
    assert len({token for text in texts for token in text[-NEW:]}) >= 8, "the text repeats itself too much"
    return base, inputs, sequences, texts


@torch.no_grad()
@pytest.mark.sampled(19)
def test_every_family_matches_greedy(family):
    base, inputs, sequences, texts = family
    model = convert(base, "medusa")
    for draft, tree in (
        (False, None),
        (True, None),
        (convert(base, "eagle").head, None),
        (convert(base, "eagle3").head, None),
        (KnowingDrafter(texts), DynamicTree(budget=12, depth=4, top_k=4)),
    ):
        drafted = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, draft=draft, tree=tree)
        assert torch.equal(drafted, sequences), f"{draft} strays from greedy"

    depth = text_layers(base)
    knowing = KnowingDrafter(texts, layers=(depth, 0, 2))
    drafted = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, draft=knowing, return_dict_in_generate=True)
    assert torch.equal(drafted.sequences, sequences)
    assert drafted.statistics()["accepted_length"] > 2.5
    assert any(len(set(step.accepted)) > 1 for step in drafted.steps), "rows never accepted different lengths"
    for row, text in enumerate(texts):
        # What the drafter was given along the way is what one forward over the whole text gives.
        given = torch.cat(knowing.features[row])[: len(text)]
        passes = [text[: len(given)]]
        if has_state(base):  # the two forms of some layers differ in more than rounding: as generate() feeds them
            passes = [text[: LENGTHS[row]], *([token] for token in text[LENGTHS[row] : len(given)])]
        whole = hidden_states(base, passes, knowing.layers)
        close = 2e-2 if has_state(base) else 1e-3  # a state adds up what rounding there is, and these weights are large
        torch.testing.assert_close(given[: len(whole)], whole, rtol=close, atol=close)
        assert len(given) >= len(text) - 6
        assert knowing.next_tokens[row][: len(text) - 1] == text[1 : 1 + len(knowing.next_tokens[row])]


WITHOUT_MTP = {
    "falcon": "needs .* of its own model", "falcon_h1": "of type 'hybrid'", "zamba": "of type 'hybrid'",
    "zamba2": "of type 'hybrid'", "gemma4_text": "reads keys of another layer",
}  # fmt: skip


@pytest.mark.sampled(13)
def test_mtp_heads_of_every_family_match_greedy(family):
    base, inputs, sequences, _ = family
    if (reason := WITHOUT_MTP.get(base.config.model_type)) is not None:
        with pytest.raises(UnsupportedModel, match=reason):
            convert(base, "mtp")
        return
    model = convert(base, "mtp", num_modules=2)
    for tree in (None, DynamicTree(budget=8, depth=3, top_k=3)):
        drafted = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, draft=True, tree=tree)
        assert torch.equal(drafted, sequences)


def test_an_mtp_head_beside_gemma_4_needs_none_of_the_keys_that_layers_share():
    options = {"tie_word_embeddings": False, "initializer_range": 0.4, "global_head_dim": 16}
    base = build("Gemma4TextConfig", {**options, "hidden_size_per_layer_input": 0})
    given = {"input_ids": torch.arange(5, 25).unsqueeze(0), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(convert(base, "mtp").generate(**given, draft=True), base.generate(**given))


def hidden_states(base, passes, layers):
    """(T, F) of the ids of all passes, each fed after the ones before."""
    cache, rows, start = None, [], 0
    for ids in passes:
        position = torch.arange(start, start + len(ids)).unsqueeze(0)
        out = base(
            torch.tensor([ids]), position_ids=position, use_cache=len(passes) > 1, output_hidden_states=True,
            **{cache_argument(base): cache},
        )  # fmt: skip
        start += len(ids)
        cache = out[cache_argument(base)] if len(passes) > 1 else None
        rows.append(torch.cat([out.hidden_states[k] for k in layers], dim=-1)[0])
    return torch.cat(rows)


def test_families_whose_positions_depend_on_the_length_match_greedy():
    for name in LENGTH_DEPENDENT:
        base, inputs = build(*LENGTH_DEPENDENT[name]), ragged_prompts()
        skip_where_transformers_loses_the_cache(base, BOUNDARY)
        sequences, texts = greedy(base, inputs)
        for draft, tree in (
            (False, None), (convert(base, "eagle3").head, None),
            (KnowingDrafter(texts), DynamicTree(budget=12, depth=4, top_k=4)), (KnowingDrafter(texts), None),
        ):  # fmt: skip
            out = convert(base, "medusa").generate(
                **inputs, max_new_tokens=NEW, do_sample=False, draft=draft, tree=tree
            )
            assert torch.equal(out, sequences), f"{draft} strays from greedy"


@torch.no_grad()
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ALL)
def test_the_layers_the_final_norm_and_the_logits_of_every_family_are_found(name):
    base = build(*ALL[name])
    layers = decoder_layers(base)
    assert layers is not None and len(layers) == text_layers(base)
    assert final_norm(base) is not None
    out = base(**ragged_prompts(), output_hidden_states=True)
    torch.testing.assert_close(logits_of(base, out.hidden_states[-1]), out.logits, rtol=1e-4, atol=1e-4)


def test_heads_start_from_the_language_layers_of_a_model_with_a_vision_tower():
    text = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8, "num_hidden_layers": 3,
            "num_key_value_heads": 2, "vocab_size": VOCAB, "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    layers = decoder_layers(transformers.Gemma3ForConditionalGeneration(config))
    assert {type(layer).__name__ for layer in layers} == {"Gemma3DecoderLayer"}


def text_layers(base):
    return base.config.get_text_config().num_hidden_layers


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2-MoE", "GPT-2", "Cohere-2", "Llama-4"], indirect=True)
def test_eager_attention_matches_greedy(family):
    _, inputs, _, _ = family
    name = type(family[0].config).__name__
    options = next(options for config, options in FAMILIES.values() if config == name)
    base = build(name, options, attn_implementation="eager")
    sequences, texts = greedy(base, inputs)
    drafted = convert(base, "medusa").generate(
        **inputs, max_new_tokens=NEW, do_sample=False, draft=KnowingDrafter(texts)
    )
    assert torch.equal(drafted, sequences)


def test_a_base_with_fewer_hidden_states_than_its_config_has_layers_takes_every_head_but_mtp():
    """LongCat-Flash: what its config counts as two layers are the parts of one."""
    latent = {name: size for name, size in LATENT.items() if name.endswith(("_rank", "_dim"))}
    experts = {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "zero_expert_num": 2, "moe_topk": 2}
    base = build("LongcatFlashConfig", {**latent, **experts, "num_layers": 2, "num_key_value_heads": 4})
    given = {"input_ids": torch.arange(5, 25).unsqueeze(0), "max_new_tokens": 12, "do_sample": False}
    for kind in ("medusa", "hydra", "eagle", "eagle3", "parallel"):
        model = convert(base, kind)
        assert max(model.head.layers) == 2
        assert torch.equal(model.generate(**given, draft=True), base.generate(**given))
    with pytest.raises(UnsupportedModel, match=r"layer 1 of longcat_flash has several parts with keys.*'eagle3'"):
        convert(base, "mtp")


def test_a_window_that_the_config_class_does_not_declare_is_kept():
    """ModernBERT's decoder: half of its local_attention, set where its config is made."""
    base = build("ModernBertDecoderConfig", {"local_attention": 16, "global_attn_every_n_layers": 2})
    given = {"input_ids": torch.arange(5, 25).unsqueeze(0), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(generate(base, **given, draft="lookup"), base.generate(**given))


def test_a_window_the_model_does_not_look_through_is_ignored():
    base = build("LlamaConfig", {"sliding_window": 8})
    assert base.config.sliding_window == 8
    inputs = ragged_prompts()
    # Without a cache, since Hugging Face's drops keys by any sliding_window it finds, while the model sees them all.
    sequences, texts = greedy(base, inputs, use_cache=False)
    drafted = convert(base, "medusa").generate(
        **inputs, max_new_tokens=NEW, do_sample=False, draft=KnowingDrafter(texts)
    )
    assert torch.equal(drafted, sequences)


def test_trees_stay_inside_a_learned_position_table():
    for name in ["GPT-2", "OPT"]:
        config, options = FAMILIES[name]
        base, inputs = build(config, {**options, "max_position_embeddings": max(LENGTHS) + NEW}), ragged_prompts()
        sequences, texts = greedy(base, inputs)
        drafted = convert(base, "medusa").generate(
            **inputs, max_new_tokens=NEW, do_sample=False, draft=KnowingDrafter(texts)
        )
        assert torch.equal(drafted, sequences)


def test_features_do_not_depend_on_which_layers_are_kept():
    for layers in [(0, 2, 4), (4, 0), (1, 2)]:
        base = build(*FAMILIES["Llama"])
        ids, lengths = torch.tensor([[5, 6, 7, 8]]), torch.tensor([4])
        with torch.no_grad():
            every = base(ids, output_hidden_states=True).hidden_states
        features = Target(base, layers=layers).prefill(ids, lengths, room=1).features
        assert torch.equal(features, torch.cat([every[k] for k in layers], dim=-1))


def test_head_of_another_dtype_generates_and_trains():
    for kind, (base_dtype, head_dtype) in itertools.product(
        ["medusa", "hydra", "eagle", "eagle3"], [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
    ):
        base = build(*FAMILIES["Llama"]).to(base_dtype)
        model = convert(base, kind, dtype=head_dtype)
        inputs = ragged_prompts()
        if base_dtype == torch.float32:  # in bfloat16 a block of tokens may round apart from one token at a time
            assert torch.equal(
                model.generate(**inputs, max_new_tokens=8, do_sample=False), greedy(base, inputs)[0][:, :25]
            )
        else:
            assert model.generate(**inputs, max_new_tokens=8, do_sample=False).shape == (3, max(LENGTHS) + 8)
        model.train()
        before = {name: parameter.detach().clone() for name, parameter in model.head.named_parameters()}
        optimizer = torch.optim.SGD(model.head.parameters(), lr=1.0)
        out = model(**inputs, labels=inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100))
        out.loss.backward()
        optimizer.step()
        assert torch.isfinite(out.loss)
        assert any(not torch.equal(before[name], parameter) for name, parameter in model.head.named_parameters())


def test_a_recurrent_module_that_was_replaced_is_found_again():
    base, ids = build(*RECURRENT["Qwen3.5"]), torch.tensor([[5, 9, 33, 12, 5, 9, 33]])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    before = generate(base, ids, draft="lookup", **options)
    for layer in base.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn = copy.deepcopy(layer.linear_attn)
            with torch.no_grad():
                layer.linear_attn.out_proj.weight.neg_()
    after = generate(base, ids, draft="lookup", **options)
    assert torch.equal(after, base.generate(ids, **options)) and not torch.equal(after, before)
