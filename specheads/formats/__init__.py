"""Draft heads in the forms of other programs. A new format is one file and one entry here.

Whatever knows a foreign name, key or layer number is in this package. `FORMATS` is in the order in which files are
recognised, the more particular form first.
"""

from specheads.formats import dspark, eagle, eagle3, hydra, medusa, modelopt, speculators, vllm_medusa
from specheads.formats.format import Format

FORMATS: tuple[Format, ...] = (
    *dspark.FORMATS, *speculators.FORMATS, *modelopt.FORMATS, *vllm_medusa.FORMATS, *hydra.FORMATS, *medusa.FORMATS,
    *eagle3.FORMATS, *eagle.FORMATS,
)  # fmt: skip

ENGINES: tuple[str, ...] = tuple(sorted({form.engine for form in FORMATS}))
