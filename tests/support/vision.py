"""Tiny random models that read images, of several families, and a processor for each of five of them."""

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast, ProcessorMixin

from tests.support.families import DELTA

PAD, V = 0, 270
SMALL = {"vocab_size": 97}  # of families without a processor here
TEXT = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.5, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": PAD,
}  # fmt: skip
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = 90


def vision_model(name, text, vision, **options):
    """A random model of that name and its prompts: two rows of an image and some text."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **options)
    config.image_token_id = IMAGE
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # some towers and projections start too small to be seen
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
    return model


def llava():
    vision = transformers.CLIPVisionConfig(**TOWER, image_size=16, patch_size=8, projection_dim=16)
    model = vision_model("Llava", LlamaConfig(**TEXT), vision, image_token_index=IMAGE)
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}, [[IMAGE] * 4 + [5, 6, 7], [IMAGE] * 4 + [8]]


def qwen(name, text=None, **vision):
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    sizes = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    model = vision_model(
        name, {**TEXT, "rope_parameters": rope, **(text or {})}, {**sizes, **vision}, image_token_id=IMAGE,
        video_token_id=93, vision_start_token_id=91, vision_end_token_id=92,
    )  # fmt: skip
    grid = torch.tensor([[1, 4, 6], [1, 4, 4]])
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4)
    prompts = [[91] + [IMAGE] * 6 + [92, 5, 6, 7], [91] + [IMAGE] * 4 + [92, 8]]
    return model, {"pixel_values": pixels, "image_grid_thw": grid}, prompts


def gemma3():
    text = transformers.Gemma3TextConfig(
        **{**TEXT, "num_hidden_layers": 6}, sliding_window=8, tie_word_embeddings=False
    )
    vision = transformers.SiglipVisionConfig(**TOWER, image_size=16, patch_size=4)
    indices = {"image_token_index": IMAGE, "boi_token_index": 91, "eoi_token_index": 92}
    model = vision_model("Gemma3", text, vision, mm_tokens_per_image=4, **indices)
    prompts = [[91] + [IMAGE] * 4 + [92, 5, 6, 7], [91] + [IMAGE] * 4 + [92, 8]]
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}, prompts


def paligemma():
    text = transformers.GemmaConfig(**{**TEXT, **SMALL}, tie_word_embeddings=False)
    vision = transformers.SiglipVisionConfig(**TOWER, image_size=8, patch_size=4, projection_dim=32)
    model = vision_model("PaliGemma", text, vision, image_token_index=IMAGE, projection_dim=32, hidden_size=32)
    return model, {"pixel_values": torch.randn(2, 3, 8, 8)}, [[IMAGE] * 4 + [5, 6, 7], [IMAGE] * 4 + [8]]


def mistral3():
    vision = transformers.PixtralVisionConfig(**TOWER, head_dim=8, image_size=16, patch_size=4)
    model = vision_model(
        "Mistral3", transformers.MistralConfig(**TEXT), vision, image_token_index=IMAGE, spatial_merge_size=2
    )
    images = {"pixel_values": torch.randn(2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16], [16, 16]])}
    return model, images, [[IMAGE] * 4 + [5, 6, 7], [IMAGE] * 4 + [8]]


def gemma4():
    text = transformers.Gemma4TextConfig(
        **{**TEXT, **SMALL, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
        sliding_window=8, tie_word_embeddings=False, global_head_dim=16, num_kv_shared_layers=2,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=SMALL["vocab_size"],
    )  # fmt: skip
    vision = transformers.Gemma4VisionConfig(
        **TOWER, num_key_value_heads=2, head_dim=8, patch_size=4, position_embedding_size=64, pooling_kernel_size=2
    )
    model = vision_model(
        "Gemma4", text, vision, boi_token_id=91, eoi_token_id=92, vision_soft_tokens_per_image=4, audio_config=None
    )
    patches = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).view(1, 16, 2)
    images = {"pixel_values": torch.randn(2, 16, 48), "image_position_ids": patches.repeat(2, 1, 1)}
    return model, images, [[91] + [IMAGE] * 4 + [92, 5, 6, 7], [91] + [IMAGE] * 4 + [92, 8]]


NEWER_QWEN = {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 64}
QWEN35 = {
    "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"], **DELTA,
    "rope_parameters": {
        "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
    },
}  # fmt: skip
VISION = {
    "Llava": llava,
    "Qwen2-VL": lambda: qwen("Qwen2VL", embed_dim=16, hidden_size=32),
    "Qwen2.5-VL": lambda: qwen(
        "Qwen2_5_VL",
        hidden_size=16,
        out_hidden_size=32,
        intermediate_size=24,
        fullatt_block_indexes=[0],
        window_size=16,
    ),
    "Qwen3-VL": lambda: qwen("Qwen3VL", **NEWER_QWEN, deepstack_visual_indexes=[0, 1]),
    "Qwen3.5": lambda: qwen("Qwen3_5", QWEN35, **NEWER_QWEN),
    "Gemma-3": gemma3,
    "Gemma-4": gemma4,
    "Mistral-3": mistral3,
    "PaliGemma": paligemma,
}

# The special tokens of a family, at ids from IMAGE on, and how its chat template shows an image.
IMAGE_TOKENS = {
    "Llava": (["<image>"], "<image>"),
    "Qwen2.5-VL": (
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "Gemma-3": (["<img>", "<boi>", "<eoi>"], "<boi>"),
    "Mistral-3": (["[IMG]", "[IMG_BREAK]", "[IMG_END]"], "[IMG]"),
}  # fmt: skip
IMAGE_TOKENS["Qwen3-VL"] = IMAGE_TOKENS["Qwen2.5-VL"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}SHOWN{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def byte_tokenizer(family):
    specials, _ = IMAGE_TOKENS[family]
    numbered = {PAD: "<pad>", 1: "<eos>", **dict(enumerate(specials, IMAGE))}
    free = (i for i in range(V) if i not in numbered)
    vocab = {token: i for i, token in numbered.items()}
    vocab |= dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), free, strict=False))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in numbered.values()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = dict(zip(("image_token", "boi_token", "eoi_token"), specials, strict=True)) if family == "Gemma-3" else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", extra_special_tokens=named or specials
    )


class _Like(ProcessorMixin):
    """What transformers' processors of Qwen and Pixtral do with images, without torchvision, which these need."""

    return_mm_token_type_ids = True

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, image_token=""):
        self.image_token, self.image_token_id = image_token, tokenizer.convert_tokens_to_ids(image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    @property
    def unused_input_names(self):
        return []


class LikeQwen(_Like):
    def replace_image_token(self, image_inputs, image_idx, **kwargs):
        return self.image_token * int(image_inputs["image_grid_thw"][image_idx].prod() // 4)


class LikePixtral(_Like):
    def replace_image_token(self, image_inputs, image_idx, **kwargs):
        height, width = (int(size) // 8 for size in image_inputs["image_sizes"][image_idx])
        return "[IMG_BREAK]".join(["[IMG]" * width] * height) + "[IMG_END]"


def processor(family):
    """A processor for the model of that family in VISION."""
    tokenizer, template = byte_tokenizer(family), TEMPLATE.replace("SHOWN", IMAGE_TOKENS[family][1])
    square = {"height": 16, "width": 16}
    if family == "Llava":
        reader = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=square)
        return transformers.LlavaProcessor(
            reader, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
            chat_template=template,
        )  # fmt: skip
    if family == "Gemma-3":
        reader = transformers.Gemma3ImageProcessorPil(size=square)
        return transformers.Gemma3Processor(reader, tokenizer, chat_template=template, image_seq_length=4)
    if family == "Mistral-3":
        reader = transformers.PixtralImageProcessorPil(size={"longest_edge": 16}, patch_size=8)
        return LikePixtral(reader, tokenizer, template, "[IMG]")
    reader = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    return LikeQwen(reader, tokenizer, template, "<|image_pad|>")


def picture(seed, width=16, height=16):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def chat(*turns):
    """Turns of (user's parts, answer): an image is a part by itself."""
    messages = []
    for parts, answer in turns:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
            for part in parts
        ]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages}
