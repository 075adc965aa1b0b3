"""Draft heads in the forms of other programs. A new format is one file and one entry here.

Whatever knows a foreign name, key or layer number is in this package. `FORMATS` is in the order in which files are
recognised, the more particular form first; of two for one engine and kind of head, the first that holds it is written.
"""

from specheads.models.formats import (
    deepspec,
    dflash,
    dspark,
    eagle,
    eagle3,
    hydra,
    medusa,
    modelopt,
    speculators,
    speculators_dflash,
    vllm_medusa,
)
from specheads.models.formats.format import Format

FORMATS: list[Format] = [
    *speculators_dflash.FORMATS, *dspark.FORMATS, *speculators.FORMATS, *deepspec.FORMATS, *dflash.FORMATS,
    *modelopt.FORMATS, *vllm_medusa.FORMATS, *hydra.FORMATS, *medusa.FORMATS, *eagle3.FORMATS, *eagle.FORMATS,
]  # fmt: skip

ENGINES: tuple[str, ...] = tuple(sorted({form.engine for form in FORMATS}))
