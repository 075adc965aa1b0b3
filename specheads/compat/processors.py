"""romsto's logits processors: each a list of Hugging Face's, the filter in front of the temperature.

Hugging Face's own generate() options apply the temperature first; a nucleus is then another one.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


class Processor(LogitsProcessorList):
    """Filters, then the temperature. do_sample: is a token drawn, or the likeliest taken?"""

    do_sample: ClassVar[bool] = True

    def __init__(self, temperature: float, *filters: Any) -> None:
        super().__init__([*filters, TemperatureLogitsWarper(float(temperature))])
        self.temperature = temperature


class GreedyProcessor(Processor):
    """The likeliest token, whatever the temperature."""

    do_sample: ClassVar[bool] = False

    def __init__(self, temperature: float = 1) -> None:
        super().__init__(temperature)


class MultinomialProcessor(Processor):
    """Sampling from the whole law."""

    def __init__(self, temperature: float) -> None:
        super().__init__(temperature)


class TopKProcessor(Processor):
    """Sampling from the top_k likeliest."""

    def __init__(self, temperature: float, top_k: int) -> None:
        super().__init__(temperature, TopKLogitsWarper(top_k))


class NucleusProcessor(Processor):
    """Sampling from the fewest tokens that have top_p of the law at temperature 1."""

    def __init__(self, temperature: float, top_p: float) -> None:
        super().__init__(temperature, TopPLogitsWarper(float(top_p)))


class TopKNucleusProcessor(Processor):
    """Sampling from the nucleus of the top_k likeliest, renormalised."""

    def __init__(self, temperature: float, top_k: int, top_p: float) -> None:
        super().__init__(temperature, TopKLogitsWarper(top_k), TopPLogitsWarper(float(top_p)))
