"""Short races of the decoders of `specheads bench`."""

from specheads.bench.compare import run
from specheads.bench.compare.decoder_spec import Cell
from specheads.bench.compare.options import BenchOptions

GREEDY = Cell("p", 1, 0.0)


def quiet(fraction, note):
    """No progress."""


def race(setup, folder, decoders, sets, specs=None, tell=quiet, **options):
    """The outcome of a run of these decoders, which are texts, or the specs given."""
    given = {"batch": 1, "temperature": 0, "max_new_tokens": 4, "repeats": 1, "out": folder, **options}
    asked = BenchOptions(decoder=decoders, **given)
    return run.run(asked, setup, specs or run.decoders_of(asked), sets, tell)


# ---------------------------------------------------------------------------------------------------- decoders as text
