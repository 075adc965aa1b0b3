"""Draft heads in the formats of other programs. A new format is one file and one entry in `FORMATS`.

All code that knows a foreign name, key or layer number is in this package. Files are matched against `FORMATS` in
order, so more specific formats come first. If two formats of one engine hold the same kind of head, export writes the
first that can hold the given one.
"""

from specheads.models.formats import speculators
from specheads.models.formats.blocks import deepspec, dflash, dflash2
from specheads.models.formats.eagle import eagle1, eagle3
from specheads.models.formats.format import Format
from specheads.models.formats.medusa import hydra
from specheads.models.formats.medusa import medusa as medusa_heads
from specheads.models.formats.mtp import of_speculators, shipped

FORMATS: list[Format] = [
    *speculators.FORMATS, *deepspec.FORMATS, *dflash2.FORMATS, *dflash.FORMATS, *hydra.FORMATS,
    *medusa_heads.FORMATS, *eagle3.FORMATS, *eagle1.FORMATS, *of_speculators.FORMATS,
    *shipped.FORMATS,
]  # fmt: skip

ENGINES: tuple[str, ...] = tuple(sorted({form.engine for form in FORMATS}))
